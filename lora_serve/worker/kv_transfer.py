"""KV blocks to bytes and back. Knows nothing of requests, hashes or tiers.

A block's bytes are its part of each cache, cache after cache, in the backend's own layout. A record
is a block of each group of layers: what one engine gathered, another may scatter, block by block,
only if `layout_fingerprint` is equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.identity import framed
from lora_serve.ops.block_rows import KnownRows, RowsRead, open_block_rows
from lora_serve.step import KVLoad

NO_ROWS = KnownRows(())
_SCHEME = b"lora-serve/kv-bytes/1"


class KVTransfer:
    """kv_caches: of any layers, dim 0 the block; views into them are kept."""

    def __init__(self, kv_caches: Sequence[Tensor], num_groups: int = 1) -> None:
        layers = [cache.view(cache.shape[0], -1).view(torch.uint8) for cache in kv_caches]
        self._rows = open_block_rows(layers)
        self._num_groups = num_groups
        self.block_bytes = sum(layer.shape[1] for layer in layers)
        self.record_bytes = num_groups * self.block_bytes

    def gather(self, block_ids: Sequence[int]) -> RowsRead:
        """Begin to copy records out, in the order asked for: num_groups blocks each."""
        return self._rows.read(block_ids, self._num_groups) if block_ids else NO_ROWS

    def scatter(self, loads: Sequence[KVLoad]) -> None:
        """Fill blocks. Every load has `block_bytes` bytes."""
        if not loads:
            return
        assert all(len(load.data) == self.block_bytes for load in loads), "a load of another size"
        self._rows.write([load.block_id for load in loads], [load.data for load in loads])


def layout_fingerprint(
    kv_caches: Sequence[Tensor],
    numerics: str,
    places: Sequence[tuple[int, int]] = (),
    num_kv_heads: int | None = None,
) -> bytes:
    """32 bytes that change whenever a record's bytes may mean something else.

    numerics: of the backend's kernels, whose private layout this is. places: each layer's group and
        cache; in a model of one group layer i has cache i, which needs no mention.
        num_kv_heads: of a record; None: these caches have them all.
    """
    facts = []
    for cache in kv_caches:
        _, both, num_own, *rest = cache.shape
        facts.append(f"{(both, num_kv_heads or num_own, *rest)} {cache.dtype}")
    facts += [f"layer {i} in {place}" for i, place in enumerate(places) if place != (0, i)]
    return hashlib.sha256(
        framed(_SCHEME, numerics.encode(), *(fact.encode() for fact in facts))
    ).digest()
