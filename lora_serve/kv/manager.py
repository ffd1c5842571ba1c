"""Which blocks hold which tokens. Knows nothing of tensors, models or requests' text.

A block becomes visible to other requests in `commit`, and nowhere else.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from lora_serve.identity import BlockHash
from lora_serve.kv.blocks import BlockPool, KVCacheBlock


class BlockHolder(Protocol):
    """The part of a request that lives here; `KVCacheManager` alone writes it, but for the hashes.

    block_ids: numbers side by side, so that a step takes a long request's as one copy of memory.
    block_hashes: one for each full block of known tokens. num_committed_blocks: how many of
    block_ids, from the front, are written and offered to others. offers_blocks: False once its
    KV must not be offered any more, because the cache was reset under it.
    """

    block_ids: array[int]
    block_hashes: list[BlockHash]
    num_committed_blocks: int
    offers_blocks: bool

    @property
    def lora_name(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class CacheHit:
    """The longest prefix found. Valid until the pool changes; holds no reference."""

    blocks: tuple[KVCacheBlock, ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_idle(self) -> int:
        """How many of the blocks nobody refers to: taking the hit takes them from the free."""
        return sum(block.ref_cnt == 0 for block in self.blocks)


class KVCacheManager:
    """Gives requests blocks, finds their prefixes, and offers what they wrote to others."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that some request refers to, 0 to 1."""
        return 1.0 - self.pool.num_free / self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, holder: BlockHolder, max_tokens: int) -> CacheHit:
        """Find the longest cached prefix of at most `max_tokens` tokens. Changes nothing."""
        if not self.enable_prefix_caching:
            return CacheHit()
        found: list[KVCacheBlock] = []
        for block_hash in holder.block_hashes[: max_tokens // self.block_size]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return CacheHit(tuple(found))

    def admit(self, holder: BlockHolder, hit: CacheHit, num_tokens: int) -> bool:
        """Give a request without blocks its hit, and new blocks for the rest of `num_tokens`.

        Asks for the blocks that are *not* cached, and for nothing when they are not to be had.
        """
        assert not holder.block_ids, "admitted while it still holds blocks"
        num_new = self.num_blocks_for(num_tokens) - hit.num_blocks
        if num_new > self.pool.num_free - hit.num_idle:
            return False
        for block in hit.blocks:  # before any is taken, lest our own hit be evicted for us
            self.pool.refer(block)
        new = [self.pool.take() for _ in range(num_new)]
        holder.block_ids.extend(block.block_id for block in (*hit.blocks, *new))
        holder.num_committed_blocks = hit.num_blocks
        return True

    def extend(self, holder: BlockHolder, num_tokens: int) -> bool:
        """Grow a request's blocks to hold `num_tokens`; False, and no change, without room."""
        num_new = self.num_blocks_for(num_tokens) - len(holder.block_ids)
        if num_new <= 0:
            return True
        if num_new > self.pool.num_free:
            return False
        holder.block_ids.extend(self.pool.take().block_id for _ in range(num_new))
        return True

    def commit(self, holder: BlockHolder, num_computed_tokens: int) -> range:
        """Offer the full blocks that finished steps have written; tells which of the holder's.

        The only way into the prefix cache, and, by its answer, into the tiers. Call it after the
        step that wrote them.
        """
        first, last = holder.num_committed_blocks, num_computed_tokens // self.block_size
        if last <= first or not holder.offers_blocks:
            return range(0)
        if self.enable_prefix_caching:
            for index in range(first, last):
                block = self.pool.blocks[holder.block_ids[index]]
                self.pool.name(block, holder.block_hashes[index], holder.lora_name)
        holder.num_committed_blocks = last
        return range(first, last)

    def free(self, holder: BlockHolder) -> None:
        for block_id in reversed(holder.block_ids):  # tail first: a prefix's head is worth most
            self.pool.release(self.pool.blocks[block_id])
        del holder.block_ids[:]
        holder.num_committed_blocks = 0

    def reset(self, lora_name: str | None = None) -> None:
        """Forget cached KV: all of it, or one adapter's. Requests keep the blocks they hold."""
        if lora_name is None:
            self.pool.forget_everything()
        else:
            self.pool.forget_adapter(lora_name)
