"""Checkpoints without files or tensors: what the registry needs of them."""

from __future__ import annotations

import hashlib

from lora_serve.adapter_checkpoint import AdapterCheckpoint


def checkpoint_of(content: str, path: str = "/adapters/one") -> AdapterCheckpoint:
    """A checkpoint whose digest is that of `content`."""
    digest = hashlib.sha256(content.encode()).digest()
    return AdapterCheckpoint(path, digest, rank=8, num_bytes=100, base_model="base", modules=())
