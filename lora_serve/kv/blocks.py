"""The pool of KV blocks: who refers to them, which are free, which can be found by hash.

Every operation is O(1) a block, and only blocks that are needed are made: a card has room for
millions of a small model's. Knows nothing of requests, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lora_serve.identity import BASE_MODEL, BlockHash, NoAdapter

_MADE_AT_ONCE = 1024


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block. Free while ref_cnt is 0; cached while block_hash is set, free or not."""

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockHash | None = None
    group: int = 0  # whose KV block_hash stands for, of all that lies at one place of a chain
    lora_name: str | NoAdapter = BASE_MODEL  # whose KV block_hash stands for


class BlockPool:
    """`num_blocks` blocks, of which the least recently used free one is reused first.

    A block is found by its hash and its group, of num_groups; any block may be any group's.
    blocks: those made so far, by id. The others are free, and go before any that can be found.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self.blocks: list[KVCacheBlock] = []
        # Those that cannot be found first, then the others, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict()
        self._by_hash: list[dict[BlockHash, KVCacheBlock]] = [{} for _ in range(num_groups)]
        self._by_lora_name: dict[str | NoAdapter, dict[int, None]] = {}  # of block ids
        self.forgot: Callable[[BlockHash, int], None] | None = None  # told hash and group
        self._make_blocks()

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - len(self.blocks)

    @property
    def num_cached(self) -> int:
        return sum(map(len, self._by_hash))

    @property
    def cached_hashes(self) -> list[list[BlockHash]]:
        """All by which a block can be found, by group."""
        return [list(by_hash) for by_hash in self._by_hash]

    def find(self, block_hash: BlockHash, group: int = 0) -> KVCacheBlock | None:
        return self._by_hash[group].get(block_hash)

    def refer(self, block: KVCacheBlock) -> None:
        """Add a reference to a block that was found by its hash."""
        if block.ref_cnt == 0:
            del self._free[block.block_id]
        block.ref_cnt += 1

    def take(self) -> KVCacheBlock:
        """Give out the least recently used free block; what it cached is forgotten."""
        if len(self.blocks) < self.num_blocks and not self._has_uncached_free:
            self._make_blocks()
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        self._forget(block)
        block.ref_cnt = 1
        return block

    @property
    def _has_uncached_free(self) -> bool:
        """Whether a free block, of those made, is not cached."""
        first = next(iter(self._free), None)
        return first is not None and self.blocks[first].block_hash is None

    def _make_blocks(self) -> None:
        begin = len(self.blocks)
        end = min(begin + _MADE_AT_ONCE, self.num_blocks)
        self.blocks += map(KVCacheBlock, range(begin, end))
        for block_id in reversed(range(begin, end)):
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)

    def release(self, block: KVCacheBlock) -> None:
        """Drop a reference. The last one frees: to the back if cached, to the front if not."""
        assert block.ref_cnt > 0, f"block {block.block_id} released more often than referred to"
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            self._free[block.block_id] = None
            if block.block_hash is None:
                self._free.move_to_end(block.block_id, last=False)

    def cache(
        self, block: KVCacheBlock, block_hash: BlockHash, lora_name: str | NoAdapter, group: int = 0
    ) -> None:
        """Let a written block be found. A hash stays with its first block; a second gets none."""
        assert block.block_hash is None, f"block {block.block_id} is cached already"
        by_hash = self._by_hash[group]
        if block_hash in by_hash:
            return
        block.block_hash, block.group, block.lora_name = block_hash, group, lora_name
        by_hash[block_hash] = block
        self._by_lora_name.setdefault(lora_name, {})[block.block_id] = None

    def forget_adapter(self, lora_name: str) -> None:
        """Let no block of an adapter be found, of all its versions; costs what it has cached."""
        block_ids = self._by_lora_name.get(lora_name, ())
        self._forget_all([self.blocks[block_id] for block_id in block_ids])

    def forget_everything(self) -> None:
        self._forget_all([block for by_hash in self._by_hash for block in by_hash.values()])

    def _forget_all(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self._forget(block)
            if block.ref_cnt == 0:
                self._free.move_to_end(block.block_id, last=False)

    def _forget(self, block: KVCacheBlock) -> None:
        if block.block_hash is None:
            return
        if self.forgot is not None:
            self.forgot(block.block_hash, block.group)
        del self._by_hash[block.group][block.block_hash]
        siblings = self._by_lora_name[block.lora_name]
        del siblings[block.block_id]
        if not siblings:
            del self._by_lora_name[block.lora_name]
        block.block_hash, block.lora_name = None, BASE_MODEL

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        free = {block.block_id for block in self.blocks if block.ref_cnt == 0}
        assert free == set(self._free), "free list and reference counts disagree"
        can_be_found = [self.blocks[i].block_hash is not None for i in self._free]
        assert can_be_found == sorted(can_be_found), "a free block that can be found goes first"
        cached = {(b.block_hash, b.group): b for b in self.blocks if b.block_hash is not None}
        by_hash = {
            (block_hash, group): block
            for group, blocks in enumerate(self._by_hash)
            for block_hash, block in blocks.items()
        }
        assert cached == by_hash, "hash index and blocks disagree"
        indexed = {
            block_id: lora_name
            for lora_name, block_ids in self._by_lora_name.items()
            for block_id in block_ids
        }
        lora_names = {block.block_id: block.lora_name for block in cached.values()}
        assert indexed == lora_names, "the index of adapters disagrees"
        assert all(self._by_lora_name.values()), "an adapter without blocks is remembered"
