"""Black-box probes of any OpenAI-compatible server with adapters and a prefix cache."""
