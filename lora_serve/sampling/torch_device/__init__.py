"""Parts of sampling in torch, for many rows at once, on any device."""
