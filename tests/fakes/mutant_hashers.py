"""Keys of KV that leave something out: bugs that traces must catch, whatever KV they go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lora_serve.identity import BlockHash, BlockHasher, CacheNamespace


class KeyHoldsOnlyTheName(BlockHasher):
    def root(self, namespace: CacheNamespace) -> BlockHash:
        adapter = namespace.adapter
        named = replace(adapter, digest=b"", generation=0) if adapter else None
        return super().root(replace(namespace, adapter=named))


class KeyIgnoresTheAdapter(BlockHasher):
    def root(self, namespace: CacheNamespace) -> BlockHash:
        return super().root(replace(namespace, adapter=None))


class KeyIgnoresEmbeds(BlockHasher):
    def extend(
        self,
        parent: BlockHash,
        token_ids: Sequence[int],
        embeds_digest: bytes = b"",
        extra: bytes = b"",
    ) -> BlockHash:
        return super().extend(parent, token_ids, b"", extra)


class KeyIgnoresTheParent(BlockHasher):
    def extend(
        self,
        parent: BlockHash,
        token_ids: Sequence[int],
        embeds_digest: bytes = b"",
        extra: bytes = b"",
    ) -> BlockHash:
        return super().extend(BlockHash(b""), token_ids, embeds_digest, extra)
