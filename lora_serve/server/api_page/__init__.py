"""The page at /docs: this API for readers."""
