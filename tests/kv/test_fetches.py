from __future__ import annotations

from lora_serve.identity import EVERYTHING, BlockHash
from lora_serve.kv.fetches import Fetch, Fetches
from lora_serve.kv_tiers.base import Cause, FetchResult, TierNamespace

BLOCK_BYTES = 10


def chain(names: str) -> list[BlockHash]:
    """A block a letter; equal beginnings are equal chains."""
    return [BlockHash(names[: i + 1].encode()) for i in range(len(names))]


def namespace(lora_name: str = "") -> TierNamespace:
    return TierNamespace(b"root", b"m", lora_name, b"", 0, b"", b"l", BLOCK_BYTES)


def start(fetches: Fetches[str], who: str, names: str, first: int = 0) -> Fetch[str]:
    fetch = fetches.start(who, namespace(), chain(names)[first:], first, give_up_time=5.0)
    assert fetch is not None
    fetches.check_invariants()
    return fetch


def give(fetches: Fetches[str], fetch: Fetch[str], count: int) -> list[str]:
    """The store has found so many blocks; who goes on."""
    blocks = tuple(memoryview(bytes([i]) * BLOCK_BYTES) for i in range(count))
    ended = fetches.take_in([FetchResult(fetch.ticket, blocks, {"ram": 1, "disk": count - 1})])
    fetches.check_invariants()
    return [who for each in ended for who in each.members]


def test_who_misses_the_same_block_joins_and_gets_what_its_own_chain_shares() -> None:
    fetches: Fetches[str] = Fetches(BLOCK_BYTES, 1000)
    fetch = start(fetches, "one", "abcd")
    assert fetches.join("two", chain("abxy"), 0)
    assert not fetches.join("three", chain("xbcd"), 0)
    assert (fetches.num_waiting, fetches.next_give_up_time) == (2, 5.0)
    assert give(fetches, fetch, 4) == ["one", "two"]
    assert (fetches.num_waiting, fetches.next_give_up_time) == (0, None)
    assert len(fetch.run_for(chain("abcd"), 0)) == 4
    assert len(fetch.run_for(chain("abxy"), 0)) == 2
    assert [bytes(block)[0] for block in fetch.run_for(chain("abcd"), 2)] == [2, 3]
    assert [fetches.has_asked("two", block) for block in range(3)] == [True, True, False]


def test_a_run_that_begins_after_the_hit_leaves_a_gap_and_is_not_used() -> None:
    fetches: Fetches[str] = Fetches(BLOCK_BYTES, 1000)
    fetch = start(fetches, "one", "abcd", first=2)
    give(fetches, fetch, 2)
    assert fetch.run_for(chain("abcd"), 1) == ()
    assert len(fetch.run_for(chain("abcd"), 2)) == 2
    assert fetch.run_for(chain("abcd"), 4) == ()


def test_blocks_are_told_by_tier_in_the_tiers_order() -> None:
    fetches: Fetches[str] = Fetches(BLOCK_BYTES, 1000)
    fetch = start(fetches, "one", "abcd")
    give(fetches, fetch, 4)
    assert fetch.tiers_of(4) == {"ram": 1, "disk": 3}
    assert fetch.tiers_of(2) == {"ram": 1, "disk": 1}
    assert fetch.tiers_of(0) == {"ram": 0, "disk": 0}


def test_memory_is_reserved_when_asked_and_given_back_when_the_last_has_gone() -> None:
    fetches: Fetches[str] = Fetches(BLOCK_BYTES, 3 * BLOCK_BYTES)
    fetch = start(fetches, "one", "abcd")
    assert len(fetch.hashes) == 3
    assert fetches.start("other", namespace(), chain("x"), 0, 5.0) is None
    fetches.join("two", chain("abcd"), 0)
    give(fetches, fetch, 1)
    assert fetches.num_bytes == BLOCK_BYTES
    for who, left in (("one", BLOCK_BYTES), ("two", 0)):
        assert fetches.forget(who) is None  # it has landed: nothing to cancel
        assert fetches.num_bytes == left
    assert fetch.blocks == ()
    assert fetches.forget("nobody") is None


def test_whoever_leaves_last_cancels_a_fetch_in_flight() -> None:
    fetches: Fetches[str] = Fetches(BLOCK_BYTES, 1000)
    fetch = start(fetches, "one", "abcd")
    fetches.join("two", chain("abcd"), 0)
    assert fetches.forget("one") is None
    assert fetches.forget("two") == fetch.ticket
    assert give(fetches, fetch, 4) == []
    assert fetches.num_bytes == 0


def test_what_is_not_answered_in_time_is_given_up_oldest_first() -> None:
    fetches: Fetches[str] = Fetches(BLOCK_BYTES, 1000)
    fetch = start(fetches, "one", "abcd")
    assert fetches.give_up(4.9) == []
    assert fetches.give_up(5.0) == [fetch]
    assert fetch.failure is Cause.DEADLINE
    assert fetches.has_asked("one", 3)
    fetches.check_invariants()


def test_only_what_a_tier_could_not_give_is_a_failure() -> None:
    fetches: Fetches[str] = Fetches(BLOCK_BYTES, 1000)
    for cause, is_failure in ((Cause.ABSENT, False), (Cause.BREAKER, False), (Cause.ERROR, True)):
        fetch = start(fetches, f"of {cause}", f"{cause}")
        fetches.take_in([FetchResult(fetch.ticket, causes={"disk": cause})])
        assert (fetch.failure is not None) == is_failure


def test_a_name_is_dropped_in_flight_and_in_hand_and_others_are_not() -> None:
    fetches: Fetches[str] = Fetches(BLOCK_BYTES, 1000)
    landed = start(fetches, "landed", "ab")
    give(fetches, landed, 2)
    in_flight = fetches.start("in_flight", namespace("a"), chain("cd"), 0, 5.0)
    assert in_flight is not None
    assert fetches.drop("b") == []
    assert fetches.drop("a") == [in_flight]
    assert len(landed.blocks) == 2
    assert fetches.drop(EVERYTHING) == []
    assert (landed.blocks, fetches.num_bytes) == ((), 0)
    assert fetches.has_asked("in_flight", 0)
    assert fetches.in_hand("in_flight") is None
    fetches.check_invariants()


def test_a_second_fetch_replaces_the_first_and_widens_what_was_asked() -> None:
    fetches: Fetches[str] = Fetches(BLOCK_BYTES, 1000)
    first = start(fetches, "one", "abcd", first=2)
    give(fetches, first, 2)
    second = start(fetches, "one", "abcd", first=1)
    assert first.blocks == ()
    assert fetches.in_hand("one") is second
    assert [fetches.has_asked("one", block) for block in range(4)] == [False, True, True, True]
