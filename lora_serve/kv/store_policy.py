"""Which committed blocks are worth storing: `--kv-store-policy`. Touches no bytes.

A policy sees every admission and every commit, and names blocks by their place in the request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from lora_serve.config import KVTierConfig
from lora_serve.identity import BlockHash

MAX_COUNTED_BLOCKS = 1 << 17  # some 30 MB; two million tokens


class StoredRequest(Protocol):
    """What a policy looks at."""

    block_hashes: list[BlockHash]
    block_size: int
    num_prompt_tokens: int
    num_preemptions: int


class StorePolicy(Protocol):
    """Chooses blocks by their place in a request's chain."""

    def admitted(self, request: StoredRequest, num_hit_blocks: int) -> Sequence[int]:
        """Choose which of the first num_hit_blocks, found in the device cache, to store now."""

    def committed(self, request: StoredRequest, blocks: range) -> Sequence[int]:
        """Choose which of the blocks that the request has just computed to store."""


class StoreAll:
    """Stores every block once, when it has been computed."""

    def admitted(self, request: StoredRequest, num_hit_blocks: int) -> Sequence[int]:
        return ()

    def committed(self, request: StoredRequest, blocks: range) -> Sequence[int]:
        return blocks


class StorePrompts(StoreAll):
    """Stores the blocks that hold tokens of the prompt alone."""

    def committed(self, request: StoredRequest, blocks: range) -> Sequence[int]:
        return blocks[: max(0, request.num_prompt_tokens // request.block_size - blocks.start)]


class StoreAfterHits:
    """Stores a block once requests have asked for it again min_hits times.

    max_counted: how many blocks it counts for, the latest ones.
    """

    def __init__(self, min_hits: int, max_counted: int = MAX_COUNTED_BLOCKS) -> None:
        self._min_hits = min_hits
        self._max_counted = max_counted
        self._num_uses: OrderedDict[BlockHash, int] = OrderedDict()  # the first is no hit

    def admitted(self, request: StoredRequest, num_hit_blocks: int) -> Sequence[int]:
        if request.num_preemptions:
            return ()  # it asks for its own blocks
        hashes = request.block_hashes
        num_hits = [self._use(block_hash) - 1 for block_hash in hashes]
        return [i for i, hits in enumerate(num_hits[:num_hit_blocks]) if hits == self._min_hits]

    def committed(self, request: StoredRequest, blocks: range) -> Sequence[int]:
        return [i for i in blocks if self._num_hits(request.block_hashes[i]) >= self._min_hits]

    def _use(self, block_hash: BlockHash) -> int:
        num_uses = self._num_uses.pop(block_hash, 0) + 1
        self._num_uses[block_hash] = num_uses
        if len(self._num_uses) > self._max_counted:
            self._num_uses.popitem(last=False)
        return num_uses

    def _num_hits(self, block_hash: BlockHash) -> int:
        if block_hash not in self._num_uses:  # generated just now
            self._use(block_hash)
        return self._num_uses[block_hash] - 1


def make_store_policy(config: KVTierConfig) -> StorePolicy:
    match config.kv_store_policy:
        case "all":
            return StoreAll()
        case "prompt-only":
            return StorePrompts()
        case _:
            return StoreAfterHits(config.kv_store_min_hits)
