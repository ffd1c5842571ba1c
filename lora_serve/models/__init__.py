"""Decoders from checkpoints."""
