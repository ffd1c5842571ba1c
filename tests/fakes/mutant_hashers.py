"""Keys of KV that leave something out: bugs that traces must catch, whatever KV they go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lora_serve.identity import BASE_MODEL, BlockHash, BlockHasher, CacheNamespace


class KeyHoldsOnlyTheName(BlockHasher):
    def root(self, namespace: CacheNamespace) -> BlockHash:
        adapter = namespace.adapter
        if adapter is not BASE_MODEL:
            adapter = replace(adapter, digest=b"", generation=0)
        return super().root(replace(namespace, adapter=adapter))


class KeyIgnoresTheAdapter(BlockHasher):
    def root(self, namespace: CacheNamespace) -> BlockHash:
        return super().root(replace(namespace, adapter=BASE_MODEL))


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
