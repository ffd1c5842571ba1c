from __future__ import annotations

import random

import pytest

from lora_serve.identity import BASE_MODEL, BlockHash
from lora_serve.kv import blocks
from lora_serve.kv.blocks import BlockPool, KVCacheBlock


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "little"))


def test_the_least_recently_freed_block_is_reused_first() -> None:
    pool = BlockPool(3)
    taken = [pool.take() for _ in range(3)]
    for number, block in enumerate(taken):
        pool.cache(block, hash_of(number), BASE_MODEL)
    for block in (taken[1], taken[0], taken[2]):
        pool.release(block)
    assert [pool.take().block_id for _ in range(3)] == [1, 0, 2]


def test_blocks_that_cannot_be_found_are_reused_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, bare = pool.take(), pool.take()
    pool.cache(cached, hash_of(1), BASE_MODEL)
    pool.release(cached)
    pool.release(bare)
    assert pool.take() is bare


def test_a_reused_block_is_no_longer_found() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.cache(block, hash_of(1), BASE_MODEL)
    pool.release(block)
    assert pool.find(hash_of(1)) is block
    pool.take()
    assert pool.find(hash_of(1)) is None


def test_a_found_block_leaves_the_free_list_and_returns_to_it() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.cache(block, hash_of(1), BASE_MODEL)
    pool.release(block)
    pool.refer(block)
    assert pool.num_free == 0
    pool.refer(block)
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1


def test_a_second_block_of_the_same_content_stays_bare() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.cache(first, hash_of(1), BASE_MODEL)
    pool.cache(second, hash_of(1), BASE_MODEL)
    assert pool.find(hash_of(1)) is first
    assert second.block_hash is None
    pool.check_invariants()


def test_forgetting_an_adapter_leaves_the_others() -> None:
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for number, (block, name) in enumerate(zip(blocks, ("a", "a", BASE_MODEL), strict=True)):
        pool.cache(block, hash_of(number), name)
    pool.forget_adapter("a")
    pool.forget_adapter("unknown")
    assert [pool.find(hash_of(n)) is not None for n in range(3)] == [False, False, True]
    pool.check_invariants()


def test_releasing_a_free_block_is_a_bug_that_shows() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_blocks_are_made_when_they_are_needed() -> None:
    pool = BlockPool(10**9)
    assert pool.num_free == 10**9
    taken = [pool.take() for _ in range(5000)]
    assert [block.block_id for block in taken] == list(range(5000))
    assert pool.num_free == 10**9 - 5000
    assert len(pool.blocks) < 10_000
    pool.check_invariants()


@pytest.mark.parametrize("made_at_once", [1, 2, 5])
def test_a_pool_that_grows_gives_out_what_a_whole_one_does(
    made_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = [life_of_a_pool(seed) for seed in range(50)]
    monkeypatch.setattr(blocks, "_MADE_AT_ONCE", made_at_once)
    assert [life_of_a_pool(seed) for seed in range(50)] == lives


def life_of_a_pool(seed: int) -> list[tuple[int, int]]:
    """How many blocks of 12 were free when one was given out, and which that was."""
    rng = random.Random(seed)
    pool = BlockPool(12)
    held: list[KVCacheBlock] = []
    given: list[tuple[int, int]] = []
    for number in range(60):
        match rng.randrange(4):
            case 0 | 1 if pool.num_free:
                given.append((pool.num_free, (block := pool.take()).block_id))
                held.append(block)
                if rng.random() < 0.5:
                    pool.cache(block, hash_of(number), rng.choice("ab"))
            case 2 if held:
                pool.release(held.pop(rng.randrange(len(held))))
            case 3 if rng.random() < 0.1:
                pool.forget_adapter("a")
        pool.check_invariants()
    return given


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_agree_with_a_naive_pool(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(12)
    held: list[int] = []  # one entry for each reference
    names: dict[bytes, int] = {}
    for _ in range(400):
        choice = rng.random()
        if choice < 0.35 and pool.num_free:
            block = pool.take()
            assert block.block_id not in held
            names = {h: b for h, b in names.items() if b != block.block_id}
            held.append(block.block_id)
        elif choice < 0.6 and held:
            block_id = held.pop(rng.randrange(len(held)))
            pool.release(pool.blocks[block_id])
        elif choice < 0.8 and held:
            block = pool.blocks[rng.choice(held)]
            name = hash_of(rng.randrange(20))
            if block.block_hash is None:
                pool.cache(block, name, rng.choice(("a", "b", BASE_MODEL)))
                names.setdefault(name, block.block_id)
        elif choice < 0.98:
            found = pool.find(hash_of(rng.randrange(20)))
            if found is not None:
                pool.refer(found)
                held.append(found.block_id)
        else:
            pool.forget_adapter("a")
            names = {h: b for h, b in names.items() if pool.blocks[b].block_hash == h}
        pool.check_invariants()
        assert {b.block_hash: b.block_id for b in pool.blocks if b.block_hash} == names
        assert all(pool.blocks[b].ref_cnt == held.count(b) for b in range(12))
