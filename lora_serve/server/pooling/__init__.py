"""vLLM's routes that are asked for hidden states, or for how close texts are by theirs."""
