"""The API process's side of the engine: requests in, deltas out."""
