"""Checkpoints without files or tensors: what the registry needs of them."""

from __future__ import annotations

import hashlib

from lora_serve.adapter_checkpoint import (
    AdapterCheckpoint,
    LoRAModule,
    ModuleBias,
    RawTensor,
    TokenRows,
)


def checkpoint_of(content: str, path: str = "/adapters/one") -> AdapterCheckpoint:
    """A checkpoint whose digest is that of `content`."""
    digest = hashlib.sha256(content.encode()).digest()
    return AdapterCheckpoint(path, digest, rank=8, num_bytes=100, base_model="base", modules=())


def whole_checkpoint(data: memoryview | None = None) -> AdapterCheckpoint:
    """A checkpoint with something in every field, which tests/test_adapter_checkpoint.py holds.

    data: 128 bytes, of which its tensors are views.
    """
    data = memoryview(bytes(range(128))) if data is None else data

    def tensor(first: int, *shape: int) -> RawTensor:
        return RawTensor("F32", shape, data[first : first + 32])

    return AdapterCheckpoint(
        path="/adapters/whole",
        digest=bytes(range(32)),
        rank=4,
        num_bytes=128,
        base_model="base",
        modules=(LoRAModule("q", 4, 0.5, tensor(0, 4, 2), tensor(32, 2, 4)),),
        invocation_tokens=(3, 4),
        token_rows=(TokenRows("head", (1, 5), tensor(64, 2, 4)),),
        biases=(ModuleBias("q", tensor(96, 8), 0.5),),
        ignored=("stranger",),
    )
