from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from lora_serve.identity import (
    BASE_MODEL,
    AdapterRef,
    BlockHash,
    BlockHasher,
    CacheNamespace,
    NoAdapter,
)
from lora_serve.kv.block_table import BlockTable
from lora_serve.kv.manager import KVCacheManager
from lora_serve.kv_groups import KVGroup

BLOCK = 4


@dataclass
class Holder:
    """A request as the manager sees it."""

    token_ids: list[int]
    lora_name: str | NoAdapter = BASE_MODEL
    embeds_digests: tuple[bytes, ...] = ()
    block_tables: list[BlockTable] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_committed_blocks: int = 0
    offers_blocks: bool = True

    def namespace_of(self, block: int) -> CacheNamespace:
        name = self.lora_name
        return CacheNamespace(b"m", name if name is BASE_MODEL else AdapterRef(name, b"d"))

    def __post_init__(self) -> None:
        hasher = BlockHasher()
        parent = hasher.root(CacheNamespace(b"m"))
        for start in range(0, len(self.token_ids) // BLOCK * BLOCK, BLOCK):
            parent = hasher.extend(parent, self.token_ids[start : start + BLOCK])
            self.block_hashes.append(parent)


def block_ids(holder: Holder) -> list[int]:
    (table,) = holder.block_tables
    return list(table.block_ids)


def admit(kv: KVCacheManager, holder: Holder) -> int:
    """Admit with the longest hit; the number of tokens hit."""
    hit = kv.lookup(holder, len(holder.token_ids) - 1)
    assert kv.admit(holder, hit, hit.num_blocks, len(holder.token_ids))
    kv.pool.check_invariants()
    return hit.num_blocks * BLOCK


def test_blocks_are_found_only_after_commit() -> None:
    kv = KVCacheManager(8, BLOCK, enable_prefix_caching=True)
    writer = Holder(list(range(10)))
    assert admit(kv, writer) == 0
    assert kv.lookup(Holder(list(range(10))), 9).num_blocks == 0
    assert kv.commit(writer, 7) == range(1)  # 7 tokens fill one block
    assert kv.lookup(Holder(list(range(10))), 9).num_blocks == 1
    assert kv.commit(writer, 10) == range(1, 2)
    assert kv.lookup(Holder(list(range(10))), 9).num_blocks == 2


def test_a_hit_never_covers_the_whole_prompt() -> None:
    kv = KVCacheManager(8, BLOCK, enable_prefix_caching=True)
    writer = Holder(list(range(8)))
    admit(kv, writer)
    kv.commit(writer, 8)
    assert admit(kv, Holder(list(range(8)))) == 4


def test_admission_asks_only_for_blocks_that_are_not_cached() -> None:
    kv = KVCacheManager(6, BLOCK, enable_prefix_caching=True)
    writer = Holder(list(range(17)))  # 5 blocks, 4 of them full
    admit(kv, writer)
    kv.commit(writer, 17)
    assert kv.pool.num_free == 1
    assert admit(kv, Holder([*range(16), 99])) == 16  # needs one more block, not five
    assert kv.pool.num_free == 0


def test_a_refused_admission_changes_nothing() -> None:
    kv = KVCacheManager(3, BLOCK, enable_prefix_caching=True)
    writer = Holder(list(range(8)))
    admit(kv, writer)
    kv.commit(writer, 8)
    kv.free(writer)
    wide = Holder([*range(8), *range(50, 58)])  # 4 blocks, 2 of them cached and idle
    hit = kv.lookup(wide, 15)
    assert hit.num_blocks == 2
    assert not kv.admit(wide, hit, 2, 16)
    assert (wide.block_tables, kv.pool.num_free) == ([], 3)
    assert kv.lookup(Holder(list(range(8))), 8).num_blocks == 2


def test_an_own_hit_is_never_evicted_for_the_same_request() -> None:
    kv = KVCacheManager(4, BLOCK, enable_prefix_caching=True)
    writer = Holder(list(range(8)))
    admit(kv, writer)
    kv.commit(writer, 8)
    kv.free(writer)
    reader = Holder([*range(8), *range(50, 57)])  # exactly the pool, half of it hit
    assert admit(kv, reader) == 8
    assert len(set(block_ids(reader))) == 4


def test_the_tail_of_a_freed_request_is_evicted_before_its_head() -> None:
    kv = KVCacheManager(4, BLOCK, enable_prefix_caching=True)
    writer = Holder(list(range(16)))
    admit(kv, writer)
    kv.commit(writer, 16)
    kv.free(writer)
    admit(kv, Holder([90, 91, 92, 93]))
    assert kv.lookup(Holder(list(range(16))), 16).num_blocks == 3


def test_extend_takes_all_or_nothing() -> None:
    kv = KVCacheManager(3, BLOCK, enable_prefix_caching=True)
    holder = Holder(list(range(4)))
    admit(kv, holder)
    assert not kv.extend(holder, 17)
    assert len(block_ids(holder)) == 1
    assert kv.extend(holder, 12)
    assert len(block_ids(holder)) == 3


@pytest.mark.parametrize("offers", [True, False])
def test_nothing_is_found_without_prefix_caching_or_after_a_reset(offers: bool) -> None:
    kv = KVCacheManager(4, BLOCK, enable_prefix_caching=not offers)
    holder = Holder(list(range(8)), offers_blocks=offers)
    admit(kv, holder)
    assert kv.commit(holder, 8) == range(2 if offers else 0)  # the tiers are told all the same
    assert kv.pool.num_cached == 0


def test_a_reset_keeps_the_blocks_that_requests_hold() -> None:
    kv = KVCacheManager(4, BLOCK, enable_prefix_caching=True)
    holder = Holder(list(range(8)), lora_name="a")
    other = Holder(list(range(50, 58)))
    for each in (holder, other):
        admit(kv, each)
        kv.commit(each, 8)
    kv.reset("a")
    assert (kv.pool.num_cached, kv.pool.num_free) == (2, 0)
    kv.reset()
    assert (kv.pool.num_cached, kv.usage) == (0, 1.0)
    kv.free(holder)
    kv.free(other)
    assert kv.usage == 0.0
    kv.pool.check_invariants()


# ── groups with windows ─────────────────────────────────────────────────────────────────────

FULL, NARROW, WIDE = KVGroup(), KVGroup(6), KVGroup(11)


def windowed_pool(*groups: KVGroup, num_blocks: int = 40, in_flight: int = 8) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, True, groups, in_flight)


def compute(kv: KVCacheManager, holder: Holder, num_tokens: int | None = None) -> None:
    """All of a holder's tokens, in one step after the other of as many as its tables hold."""
    num_tokens = num_tokens or len(holder.token_ids)
    num_computed = holder.num_committed_blocks * BLOCK
    while num_computed < num_tokens:
        num_scheduled = min(num_tokens, kv.most_tokens(holder))
        assert kv.extend(holder, num_scheduled)
        kv.check_tables(holder, num_computed, num_scheduled)
        num_computed = num_scheduled
        kv.commit(holder, num_computed)
        kv.free_unseen(holder, num_computed)
        kv.check_invariants([holder])


def held_blocks(holder: Holder) -> list[int]:
    return [len(table.seen_block_ids) for table in holder.block_tables]


def test_a_window_holds_what_it_sees_while_a_full_group_holds_all() -> None:
    kv = windowed_pool(FULL, NARROW, WIDE)
    holder = Holder(list(range(40)))
    admit(kv, holder)
    assert held_blocks(holder) == [10, 4, 6]
    compute(kv, holder)
    assert held_blocks(holder) == [10, 2, 3]  # the next token sees 5, and 10, before it
    assert kv.pool.num_cached == 30  # what was freed is found until it is reused
    kv.free(holder)
    assert kv.usage == 0.0


def test_a_prefix_is_found_up_to_where_each_window_has_what_it_sees() -> None:
    kv = windowed_pool(FULL, NARROW, WIDE)
    writer = Holder(list(range(40)))
    admit(kv, writer)
    compute(kv, writer)
    hit = kv.lookup(Holder(list(range(40))), 39)
    assert (hit.num_blocks, [len(blocks) for blocks in hit.blocks]) == (9, [9, 2, 3])

    def forget(group: int, block: int) -> None:
        found = kv.pool.find(writer.block_hashes[block], group)
        assert found is not None
        kv.pool._forget(found)

    forget(1, 2)  # seen from 3 or 4 blocks on, not from 9
    assert kv.lookup(writer, 39).num_blocks == 9
    assert kv.lookup(writer, 19).num_blocks == 2
    forget(2, 7)
    assert kv.lookup(writer, 39).num_blocks == 7
    forget(1, 6)
    assert kv.lookup(writer, 39).num_blocks == 6
    forget(0, 3)
    assert kv.lookup(writer, 39).num_blocks == 2


def naive_hit(kv: KVCacheManager, holder: Holder, most_blocks: int) -> int:
    for num_blocks in range(most_blocks, 0, -1):
        if all(
            kv.pool.find(holder.block_hashes[block], index) is not None
            for index, group in enumerate(kv.needs.groups)
            for block in range(group.first_seen(num_blocks * BLOCK, BLOCK), num_blocks)
        ):
            return num_blocks
    return 0


@pytest.mark.parametrize("groups", [(NARROW,), (WIDE, NARROW), (NARROW, FULL, WIDE)], ids=str)
def test_a_lookup_agrees_with_trying_every_length(groups: tuple[KVGroup, ...]) -> None:
    rng = random.Random(1)
    lengths = set()
    for _ in range(300):
        kv = windowed_pool(*groups, num_blocks=80)
        holder = Holder(list(range(60)))
        admit(kv, holder)
        compute(kv, holder)
        for block in rng.sample(kv.pool.blocks, rng.randrange(40)):
            kv.pool._forget(block)
        lengths.add(found := kv.lookup(holder, 59).num_blocks)
        assert found == naive_hit(kv, holder, 14)
    assert len(lengths) > 3


def test_a_hit_refers_to_what_the_next_token_sees_and_to_no_more() -> None:
    kv = windowed_pool(NARROW)
    writer = Holder(list(range(40)))
    admit(kv, writer)
    compute(kv, writer)
    kv.free(writer)
    reader = Holder([*range(40), 50])
    assert admit(kv, reader) == 40
    assert held_blocks(reader) == [3]  # two of the prefix, one for the last token
    assert kv.pool.num_free == 37


def test_what_the_tiers_give_needs_blocks_for_what_is_seen_of_it() -> None:
    kv = windowed_pool(NARROW)
    holder = Holder(list(range(40)))
    assert kv.admit(holder, kv.lookup(holder, 39), 9, 40)
    assert held_blocks(holder) == [3]
    assert holder.num_committed_blocks == 0
    kv.commit(holder, 40)
    assert kv.lookup(holder, 39).num_blocks == 9


def test_a_hit_that_others_hold_comes_on_top_of_what_is_reserved() -> None:
    """Freeing it would give nothing back for the rest of the prompt."""
    kv = windowed_pool(NARROW, num_blocks=20)
    writer = Holder(list(range(40)))
    admit(kv, writer)
    compute(kv, writer)
    reader = Holder([*range(40), *range(100, 160)])
    admit(kv, reader)
    assert held_blocks(reader) == [2 + 4]
    while kv.pool.num_free:
        kv.pool.take()
    num_computed = 40
    while num_computed < 100:
        num_scheduled = min(100, kv.most_tokens(reader))
        assert kv.extend(reader, num_scheduled), "its own blocks must be enough"
        num_computed = num_scheduled
        kv.commit(reader, num_computed)
        kv.free_unseen(reader, num_computed)


@pytest.mark.parametrize("groups", [(KVGroup(),), (KVGroup(), KVGroup(6)), (KVGroup(6),)])
def test_what_fits_without_a_request_is_admitted_when_that_was_freed(
    groups: tuple[KVGroup, ...],
) -> None:
    rng, outcomes = random.Random(4), Counter[tuple[bool, bool]]()
    for _ in range(300):
        kv = KVCacheManager(10 * len(groups), BLOCK, True, groups, in_flight=4)
        running = []
        for _ in range(3):
            length = rng.randrange(1, 24)
            holder = Holder([rng.randrange(2)] * 8 + list(range(length)))
            hit = kv.lookup(holder, len(holder.token_ids) - 1)
            if kv.admit(holder, hit, hit.num_blocks, len(holder.token_ids)):
                kv.commit(holder, min(len(holder.token_ids), kv.capacity(holder)))
                running.append(holder)
        victim = rng.choice(running)
        waiting = Holder([rng.randrange(2)] * 8 + list(range(rng.randrange(1, 30))))
        hit = kv.lookup(waiting, len(waiting.token_ids) - 1)
        ask = (hit, hit.num_blocks, len(waiting.token_ids))
        fits = kv.fits(*ask, without=victim)
        needs_it = not kv.admit(replace(waiting, block_tables=[]), *ask)
        outcomes[fits, needs_it] += 1
        if needs_it:
            kv.free(victim)
            assert kv.admit(waiting, *ask) >= fits
            kv.check_invariants([*running, waiting])
        else:
            assert fits
    assert {(True, False), (True, True), (False, True)} <= outcomes.keys()
