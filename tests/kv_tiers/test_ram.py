from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.kv_tiers.base import Cause, Drop, Record
from lora_serve.kv_tiers.codec import record_bytes
from lora_serve.kv_tiers.ram import RamTier
from tests.fakes.kv_blocks import a_namespace, chain, records

NS = a_namespace()
SIZE = record_bytes(NS)
HASHES = chain(NS, "a prompt", 8)


def test_a_load_gives_the_longest_run_from_the_first_block() -> None:
    tier = RamTier(100 * SIZE)
    saved = records(NS, HASHES)
    tier.save(NS, saved[:3] + saved[4:])
    loaded = tier.load(NS, HASHES)
    assert list(loaded.records) == saved[:3]
    assert loaded.cause == Cause.ABSENT
    assert tier.load(NS, HASHES[4:]).cause is None


def test_the_bound_holds_and_the_least_recently_used_goes_first() -> None:
    tier = RamTier(8 * SIZE)
    tier.save(NS, records(NS, HASHES))
    tier.load(NS, HASHES[:4])
    others = chain(NS, "another prompt", 4)
    tier.save(NS, records(NS, others))
    assert [tier.holds(NS, h) for h in HASHES] == [True] * 4 + [False] * 4
    assert all(tier.holds(NS, h) for h in others)
    contents = tier.contents()
    assert (contents.num_bytes, contents.num_blocks, contents.num_evicted) == (8 * SIZE, 8, 4)


def test_of_one_prompt_the_tail_goes_before_the_head() -> None:
    tier = RamTier(4 * SIZE)
    tier.save(NS, records(NS, HASHES))
    assert [tier.holds(NS, h) for h in HASHES] == [True] * 4 + [False] * 4


def test_a_record_that_went_bad_in_memory_is_refused_and_forgotten() -> None:
    tier = RamTier(100 * SIZE)
    (record,) = records(NS, HASHES[:1])
    flipped = bytearray(record.payload)
    flipped[7] ^= 1
    tier.save(NS, [Record(HASHES[0], record.header, flipped)])
    assert tier.load(NS, HASHES[:1]).cause == Cause.CHECKSUM
    assert tier.load(NS, HASHES[:1]).cause == Cause.ABSENT
    assert tier.contents().quarantined == {"checksum": 1}


def test_records_keep_nothing_alive_but_their_own_bytes() -> None:
    tier = RamTier(100 * SIZE)
    large = bytearray(100 * SIZE)
    (record,) = records(NS, HASHES[:1])
    tier.save(NS, [Record(HASHES[0], record.header, memoryview(large)[: NS.block_bytes])])
    large.clear()  # raises if a view of it were left


def test_dropping_an_adapter_keeps_the_named_version_and_other_adapters() -> None:
    tier = RamTier(100 * SIZE)
    spaces = [a_namespace("n", "A"), a_namespace("n", "B"), a_namespace("n", "B", salt="s"),
              a_namespace("n", "B", generation=1), a_namespace("m", "A")]  # fmt: skip
    hashes = [chain(space, "p", 2) for space in spaces]
    for space, some in zip(spaces, hashes, strict=True):
        tier.save(space, records(space, some))
    tier.drop(Drop(b"model", "n", (spaces[1].digest, 0)))
    kept = [tier.holds(space, some[0]) for space, some in zip(spaces, hashes, strict=True)]
    assert kept == [False, True, True, False, True]
    tier.drop(Drop(b"model", "n"))
    assert tier.contents().num_blocks == 2
    tier.drop(Drop(b"model"))
    assert tier.contents().num_bytes == 0


@given(
    st.lists(st.tuples(st.sampled_from("sld"), st.integers(0, 5), st.integers(1, 6)), max_size=40)
)
def test_the_bound_and_the_sums_hold_in_any_life(acts: list[tuple[str, int, int]]) -> None:
    tier = RamTier(10 * SIZE)
    for act, which, count in acts:
        space = a_namespace(f"n{which % 3}")
        hashes = chain(space, f"p{which}", count)
        if act == "s":
            tier.save(space, records(space, hashes))
        elif act == "l":
            tier.load(space, hashes)
        else:
            tier.drop(Drop(b"model", space.lora_name))
        contents = tier.contents()
        assert contents.num_bytes == contents.num_blocks * SIZE <= 10 * SIZE
