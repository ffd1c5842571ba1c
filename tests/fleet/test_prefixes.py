from __future__ import annotations

from lora_serve.fleet.prefixes import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    REPLICAS_PER_PREFIX,
    PrefixMemory,
    prefix_hashes,
)

ROOT = b"root"


def text(*chunks: str) -> bytes:
    """Chunks that are each filled with one letter."""
    return b"".join(chunk.encode() * CHUNK_BYTES for chunk in chunks)


def test_equal_beginnings_have_equal_hashes_and_no_other_has() -> None:
    one, two = prefix_hashes(text("a", "b", "c")), prefix_hashes(text("a", "b", "d") + b"tail")
    assert one[:2] == two[:2]
    assert len(one) == len(two) == 3
    assert len({*one, *two}) == 4
    assert prefix_hashes(text("b", "a"))[1] not in one


def test_an_incomplete_chunk_has_no_hash_and_a_long_text_no_more_than_the_most() -> None:
    assert prefix_hashes(b"") == prefix_hashes(b"x" * (CHUNK_BYTES - 1)) == ()
    assert len(prefix_hashes(b"x" * CHUNK_BYTES * (MAX_CHUNKS + 9))) == MAX_CHUNKS


def test_a_replica_is_credited_with_what_it_was_sent_from_the_beginning_on() -> None:
    memory = PrefixMemory(1000)
    memory.note(ROOT, prefix_hashes(text("a", "b", "c")), "one")
    memory.note(ROOT, prefix_hashes(text("a", "x")), "two")
    asked = prefix_hashes(text("a", "b", "c", "d"))
    assert memory.lengths(ROOT, asked) == {"one": 3, "two": 1}
    assert memory.lengths(b"another root", asked) == {}
    assert memory.lengths(ROOT, prefix_hashes(text("b", "c"))) == {}


def test_a_replica_that_fell_out_of_a_beginning_is_credited_with_nothing_behind_it() -> None:
    memory = PrefixMemory(1000)
    memory.note(ROOT, prefix_hashes(text("a", "b")), "old")
    for number in range(REPLICAS_PER_PREFIX):
        memory.note(ROOT, prefix_hashes(text("a", str(number))), f"new{number}")
    lengths = memory.lengths(ROOT, prefix_hashes(text("a", "b")))
    assert lengths == {f"new{number}": 1 for number in range(REPLICAS_PER_PREFIX)}


def test_of_prefixes_above_the_most_the_oldest_and_of_one_the_tail_is_forgotten_first() -> None:
    memory = PrefixMemory(4)
    memory.note(ROOT, prefix_hashes(text("a", "b", "c")), "one")  # with its root: 4
    memory.note(b"other", (), "two")
    assert len(memory) == 4
    assert memory.lengths(ROOT, prefix_hashes(text("a", "b", "c"))) == {"one": 2}
    assert memory.replicas(ROOT) == ("one",)
    assert memory.replicas(b"other") == ("two",)
