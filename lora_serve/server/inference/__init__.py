"""Tokens in, tokens out: the routes of vLLM's scale-out protocol."""
