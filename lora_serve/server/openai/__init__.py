"""Routes and formats of OpenAI's and vLLM's clients."""
