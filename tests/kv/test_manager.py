from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from lora_serve.identity import BlockHash, BlockHasher, CacheNamespace
from lora_serve.kv.block_table import BlockTable
from lora_serve.kv.manager import KVCacheManager

BLOCK = 4


@dataclass
class Holder:
    """A request as the manager sees it."""

    tokens: list[int]
    lora_name: str | None = None
    block_tables: list[BlockTable] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_committed_blocks: int = 0
    offers_blocks: bool = True

    def __post_init__(self) -> None:
        hasher = BlockHasher()
        parent = hasher.root(CacheNamespace(b"m"))
        for start in range(0, len(self.tokens) // BLOCK * BLOCK, BLOCK):
            parent = hasher.extend(parent, self.tokens[start : start + BLOCK])
            self.block_hashes.append(parent)


def block_ids(holder: Holder) -> list[int]:
    (table,) = holder.block_tables
    return list(table.block_ids)


def admit(kv: KVCacheManager, holder: Holder) -> int:
    """Admit with the longest hit; the number of tokens hit."""
    hit = kv.lookup(holder, len(holder.tokens) - 1)
    assert kv.admit(holder, hit, hit.num_blocks, len(holder.tokens))
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
