"""GGUF files: what their headers say, and which file a model's name means. Reads no tensor."""
