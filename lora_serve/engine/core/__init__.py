"""The engine process: scheduling, KV, adapters and the executor."""
