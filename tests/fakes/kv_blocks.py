"""Namespaces, chains and blocks for tests of the KV tiers."""

from __future__ import annotations

import hashlib

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Record, TierNamespace
from lora_serve.kv_tiers.codec import make_record

BLOCK_BYTES = 512


def a_namespace(
    lora_name: str = "n",
    version: str = "A",
    *,
    generation: int = 0,
    salt: str = "",
    layout: bytes = b"layout",
    model: bytes = b"model",
    block_bytes: int = BLOCK_BYTES,
) -> TierNamespace:
    digest = hashlib.sha256(version.encode()).digest() if lora_name else b""
    fields = (lora_name, version, generation, salt, layout, model, block_bytes)
    return TierNamespace(
        root=hashlib.sha256(repr(fields).encode()).digest(),
        model=model,
        lora_name=lora_name,
        digest=digest,
        generation=generation,
        salt_digest=hashlib.sha256(salt.encode()).digest() if salt else b"",
        layout=layout,
        block_bytes=block_bytes,
    )


def chain(namespace: TierNamespace, prompt: str, count: int) -> list[BlockHash]:
    """Hashes of `count` consecutive blocks."""
    hashes = [namespace.root]
    for i in range(count):
        hashes.append(hashlib.sha256(hashes[-1] + f"{prompt}/{i}".encode()).digest())
    return [BlockHash(block_hash) for block_hash in hashes[1:]]


def content(namespace: TierNamespace, block_hash: BlockHash) -> bytes:
    """The only right bytes of a block."""
    return hashlib.shake_128(b"content" + block_hash).digest(namespace.block_bytes)


def blocks(namespace: TierNamespace, hashes: list[BlockHash]) -> list[tuple[BlockHash, bytes]]:
    return [(block_hash, content(namespace, block_hash)) for block_hash in hashes]


def records(namespace: TierNamespace, hashes: list[BlockHash]) -> list[Record]:
    return [make_record(namespace, h, payload, 0.0) for h, payload in blocks(namespace, hashes)]
