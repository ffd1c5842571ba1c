"""Which blocks hold which tokens. Knows nothing of tensors, models or requests' text.

A block becomes visible to other requests in `commit`, and nowhere else. One pool serves all groups
of layers: a block is a page of one group, and a request has a block table for each.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_serve.identity import EVERYTHING, BlockHash, CacheNamespace, Everything
from lora_serve.kv.block_table import BlockTable
from lora_serve.kv.blocks import BlockPool, KVCacheBlock
from lora_serve.kv.event_recorder import KVEventRecorder
from lora_serve.kv_groups import KVGroup, KVNeeds

_NONE = range(0)
_NO_BLOCK = 0  # stands in a table for a block that no token sees any more


class BlockHolder(Protocol):
    """What the cache knows of a request.

    block_tables: one a group; none while it holds no blocks. num_committed_blocks: how many, from
    the front, are written and offered to others. `KVCacheManager` alone writes these two.
    block_hashes: one for each full block of known tokens. offers_blocks: False while its KV must
    not be offered, because the cache was reset under it.
    """

    block_tables: list[BlockTable]
    block_hashes: list[BlockHash]
    token_ids: list[int]
    embeds_digests: tuple[bytes, ...]
    num_committed_blocks: int
    offers_blocks: bool

    def namespace_of(self, block: int) -> CacheNamespace: ...


@dataclass(frozen=True, slots=True)
class CacheHit:
    """The longest prefix found. Valid until the pool changes; holds no reference.

    blocks: of each group the last blocks of the prefix, all that the next token sees.
    """

    num_blocks: int = 0
    blocks: tuple[Sequence[KVCacheBlock], ...] = ()


@dataclass(frozen=True, slots=True)
class _Allotment:
    """What an admission takes of one group: blocks that were found, then new ones.

    num_unseen: blocks before these, which no token to be computed sees.
    """

    num_unseen: int
    found: Sequence[KVCacheBlock]
    num_new: int


class KVCacheManager:
    """Gives requests blocks, finds their prefixes, and offers what they wrote to others.

    groups: of the model's layers. in_flight: as of KVNeeds.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        groups: Sequence[KVGroup] = (KVGroup(),),
        in_flight: int = 1,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.needs = KVNeeds(tuple(groups), block_size, in_flight)
        self.pool = BlockPool(num_blocks, len(groups))
        self._windowed = [(i, group) for i, group in enumerate(groups) if group.window is not None]
        self.has_windows = bool(self._windowed)  # asked for each request of each step
        self._events: KVEventRecorder | None = None

    def record_events(self, recorder: KVEventRecorder) -> None:
        """Tell `recorder` of each block that comes to be found, or is forgotten, from now on."""
        self._events, self.pool.forgot = recorder, recorder.removed

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def size_tokens(self) -> int:
        """How many tokens of requests that see all of their tokens the blocks hold."""
        return self.num_blocks // len(self.needs.groups) * self.needs.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that some request refers to, 0 to 1."""
        return 1.0 - self.pool.num_free / self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, holder: BlockHolder, max_tokens: int) -> CacheHit:
        """Find the longest cached prefix of at most `max_tokens` tokens. Changes nothing.

        Of a group without a window all blocks must be there, of one with a window those that the
        next token sees.
        """
        if not self.enable_prefix_caching:
            max_tokens = 0
        hashes = holder.block_hashes[: max_tokens // self.block_size]
        found: dict[int, list[KVCacheBlock]] = {}
        for index, group in enumerate(self.needs.groups):
            if group.window is None:
                found[index] = self._leading(hashes, index)
                hashes = hashes[: len(found[index])]
        if self._windowed:
            hashes = hashes[: self._num_seen_whole(hashes)]
            for index, group in self._windowed:
                found[index] = self._seen(hashes, index, group)
        return CacheHit(
            len(hashes), tuple(found[index][: len(hashes)] for index in range(len(found)))
        )

    def admit(self, holder: BlockHolder, hit: CacheHit, num_found: int, num_tokens: int) -> bool:
        """Give a request without blocks its hit, and new blocks for the rest of `num_tokens`.

        Of a group with a window it gets as many as it can need at once: those that it frees
        serve the rest. Asks for the blocks that are *not* cached, and for nothing when they are
        not to be had.

        Args:
            num_found: blocks that need not be computed: those of the hit, and what tiers gave.
        """
        assert not holder.block_tables, "admitted while it still holds blocks"
        parts = self._allotments(hit, num_found, num_tokens)
        if self._num_lacking(parts) > 0:
            return False
        for part in parts:  # before any is taken, lest our own hit be evicted for us
            for block in part.found:
                self.pool.refer(block)
        holder.block_tables = [self._table(part) for part in parts]
        holder.num_committed_blocks = hit.num_blocks
        return True

    def fits(self, hit: CacheHit, num_found: int, num_tokens: int, without: BlockHolder) -> bool:
        """Whether `admit` has enough blocks if `without` is freed before. Changes nothing."""
        parts = self._allotments(hit, num_found, num_tokens)
        num_lacking = self._num_lacking(parts)
        if num_lacking <= 0:
            return True
        found = {block.block_id for part in parts for block in part.found}
        num_freed = sum(
            block_id not in found and self.pool.blocks[block_id].ref_cnt == 1
            for table in without.block_tables
            for block_id in table.seen_block_ids
        )
        return num_lacking <= num_freed

    def extend(self, holder: BlockHolder, num_tokens: int, num_spared: int = 0) -> bool:
        """Grow a request's tables to hold `num_tokens`; False, and no change, without room.

        num_spared: blocks that must be free afterwards, if any are taken.
        """
        num_blocks = -(-num_tokens // self.block_size)
        short = None
        for table in holder.block_tables:  # most often each is long enough
            if len(table.block_ids) < num_blocks:
                short = [t.block_ids for t in holder.block_tables if len(t.block_ids) < num_blocks]
                break
        if short is None:
            return True
        if (
            sum(num_blocks - len(block_ids) for block_ids in short)
            > self.pool.num_free - num_spared
        ):
            return False
        for block_ids in short:
            num_new = num_blocks - len(block_ids)
            block_ids.extend(self.pool.take().block_id for _ in range(num_new))
        return True

    def capacity(self, holder: BlockHolder) -> int:
        """How many tokens its tables hold as they are."""
        return self.block_size * min(len(table.block_ids) for table in holder.block_tables)

    def most_tokens(self, holder: BlockHolder) -> int:
        """How many tokens its tables may hold until more of them are computed.

        At least `in_flight` more than are computed.
        """
        return self.block_size * min(
            max(len(table.block_ids), table.num_unseen + self.needs.most_seen(group))
            for group, table in zip(self.needs.groups, holder.block_tables, strict=True)
            if group.window is not None
        )

    def commit(self, holder: BlockHolder, num_computed_tokens: int) -> range:
        """Offer the full blocks that finished steps have written; tells which of the holder's.

        The only way into the prefix cache, and, by its answer, into the tiers. Call it after the
        step that wrote them.
        """
        first, last = holder.num_committed_blocks, num_computed_tokens // self.block_size
        if last <= first or not holder.offers_blocks:
            return _NONE
        if self.enable_prefix_caching:
            for group, table in enumerate(holder.block_tables):
                for index in range(max(first, table.num_unseen), last):
                    block = self.pool.blocks[table.block_ids[index]]
                    lora_name = holder.namespace_of(index).lora_name
                    self.pool.cache(block, holder.block_hashes[index], lora_name, group)
                    if self._events is not None and block.block_hash is not None:
                        self._events.stored(holder, index, group)
        holder.num_committed_blocks = last
        return range(first, last)

    def free_unseen(self, holder: BlockHolder, num_computed_tokens: int) -> None:
        """Free the blocks that no later token sees, once finished steps have computed so many.

        Steps in flight begin where these end, so they see none of them either. Call it after
        `commit`: then they can be found until they are reused.
        """
        for index, group in self._windowed:
            table = holder.block_tables[index]
            first_seen = group.first_seen(num_computed_tokens, self.block_size)
            for place in range(table.num_unseen, first_seen):
                self.pool.release(self.pool.blocks[table.block_ids[place]])
                table.block_ids[place] = _NO_BLOCK
            table.num_unseen = first_seen

    def free(self, holder: BlockHolder) -> None:
        for table in holder.block_tables:
            # Tail first: a prefix's head is worth most.
            for block_id in reversed(table.seen_block_ids):
                self.pool.release(self.pool.blocks[block_id])
        holder.block_tables = []
        holder.num_committed_blocks = 0

    def reset(self, lora_name: str | Everything = EVERYTHING) -> None:
        """Forget cached KV: all of it, or one adapter's. Requests keep the blocks they hold."""
        if lora_name is EVERYTHING:
            if self._events is not None:
                self._events.cleared()
            self.pool.forget_everything()
        else:
            self.pool.forget_adapter(lora_name)

    def check_invariants(self, holders: Iterable[BlockHolder]) -> None:
        """Assert that the pool is sound, and that these refer to what is referred to of it."""
        self.pool.check_invariants()
        num_references = Counter(
            block_id
            for holder in holders
            for table in holder.block_tables
            for block_id in table.seen_block_ids
        )
        for block in self.pool.blocks:
            count = num_references[block.block_id]
            assert block.ref_cnt == count, f"block {block.block_id}: {block.ref_cnt} of {count}"

    def check_tables(self, holder: BlockHolder, num_computed: int, num_scheduled: int) -> None:
        """Assert that a holder has the blocks that steps in flight see and write, and no more."""
        for group, table in zip(self.needs.groups, holder.block_tables, strict=True):
            num_unseen = group.first_seen(num_computed, self.block_size)
            assert table.num_unseen == num_unseen, f"{table.num_unseen} not {num_unseen} unseen"
            room = len(table.block_ids) * self.block_size
            assert num_scheduled <= room, f"{num_scheduled} tokens in blocks for {room}"

    def _leading(self, hashes: Sequence[BlockHash], group: int) -> list[KVCacheBlock]:
        """The first blocks, as far as they are cached without a gap."""
        found = []
        for block_hash in hashes:
            block = self.pool.find(block_hash, group)
            if block is None:
                break
            found.append(block)
        return found

    def _num_seen_whole(self, hashes: Sequence[BlockHash]) -> int:
        """Count the blocks of the longest prefix whose next token sees all it may in every window.

        Each window walks back from the end until it has seen enough, and cuts off the end where it
        misses a block; no block is looked for twice.
        """
        end, last_end = len(hashes), -1
        known = dict.fromkeys(self._windowed, end)  # cached from here on to the end
        while end != last_end:
            last_end = end
            for window in self._windowed:
                index, group = window
                at = min(known[window], end)
                while at > group.first_seen(end * self.block_size, self.block_size):
                    at -= 1
                    if self.pool.find(hashes[at], index) is None:
                        end = at
                known[window] = at
        return end

    def _seen(self, hashes: Sequence[BlockHash], index: int, group: KVGroup) -> list[KVCacheBlock]:
        """The cached blocks that the token after all these blocks sees."""
        first = group.first_seen(len(hashes) * self.block_size, self.block_size)
        found = [self.pool.find(block_hash, index) for block_hash in hashes[first:]]
        return [block for block in found if block is not None]

    def _allotments(self, hit: CacheHit, num_found: int, num_tokens: int) -> list[_Allotment]:
        return [
            self._allot(group, hit.num_blocks, found, num_found, num_tokens)
            for group, found in zip(self.needs.groups, hit.blocks, strict=True)
        ]

    def _num_lacking(self, parts: Sequence[_Allotment]) -> int:
        """How many new blocks there are too few; none if it is not above 0."""
        num_idle = sum(block.ref_cnt == 0 for part in parts for block in part.found)
        return sum(part.num_new for part in parts) - (self.pool.num_free - num_idle)

    def _allot(
        self,
        group: KVGroup,
        num_hit: int,
        hit: Sequence[KVCacheBlock],
        num_found: int,
        num_tokens: int,
    ) -> _Allotment:
        num_unseen = group.first_seen(num_found * self.block_size, self.block_size)
        found = hit[max(0, num_unseen - (num_hit - len(hit))) :]
        num_blocks = self.num_blocks_for(num_tokens)
        if group.window is not None:
            # What others hold, too, is not free for us when we free it.
            num_shared = sum(block.ref_cnt > 0 for block in found)
            most = self.needs.most_seen(group) + num_shared
            num_blocks = min(num_blocks, num_unseen + most)
        return _Allotment(num_unseen, found, num_blocks - num_unseen - len(found))

    def _table(self, part: _Allotment) -> BlockTable:
        block_ids = array("i", [_NO_BLOCK]) * part.num_unseen
        block_ids.extend(block.block_id for block in part.found)
        block_ids.extend(self.pool.take().block_id for _ in range(part.num_new))
        return BlockTable(block_ids, part.num_unseen)
