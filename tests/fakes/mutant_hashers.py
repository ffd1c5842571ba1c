"""Keys of KV that leave something out: bugs that traces must catch, whatever KV they go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lora_serve.identity import BASE_MODEL, Activation, BlockHash, BlockHasher, CacheNamespace


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
        activation: Activation | None = None,
    ) -> BlockHash:
        return super().extend(parent, token_ids, b"", activation)


class KeyIgnoresTheParent(BlockHasher):
    def extend(
        self,
        parent: BlockHash,
        token_ids: Sequence[int],
        embeds_digest: bytes = b"",
        activation: Activation | None = None,
    ) -> BlockHash:
        return super().extend(BlockHash(b""), token_ids, embeds_digest, activation)


class KeyIgnoresTheActivation(BlockHasher):
    def extend(
        self,
        parent: BlockHash,
        token_ids: Sequence[int],
        embeds_digest: bytes = b"",
        activation: Activation | None = None,
    ) -> BlockHash:
        return super().extend(parent, token_ids, embeds_digest)


class KeyIgnoresWhereAnAdapterBegins(BlockHasher):
    def extend(
        self,
        parent: BlockHash,
        token_ids: Sequence[int],
        embeds_digest: bytes = b"",
        activation: Activation | None = None,
    ) -> BlockHash:
        if activation is not None:
            activation = replace(activation, start=1)
        return super().extend(parent, token_ids, embeds_digest, activation)
