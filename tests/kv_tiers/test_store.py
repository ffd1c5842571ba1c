from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_serve.engine_stats import TierFigures
from lora_serve.identity import EVERYTHING, BlockHash, Everything
from lora_serve.kv_tiers import deadlines
from lora_serve.kv_tiers.base import Cause, Drop, FetchResult, Tier, TierNamespace
from lora_serve.kv_tiers.codec import record_bytes
from lora_serve.kv_tiers.disk.tier import DiskTier
from lora_serve.kv_tiers.fetch import Fetch
from lora_serve.kv_tiers.ram import RamTier
from lora_serve.kv_tiers.store import TieredStore
from tests.fakes.faulty_tier import FaultyTier
from tests.fakes.kv_blocks import a_namespace, blocks, chain, content, records


class Caller:
    """What an engine does with a store: asks, waits to be notified, takes results."""

    def __init__(self, *tiers: Tier, close_seconds: float = 10.0) -> None:
        self._notified = threading.Event()
        self.store = TieredStore(tiers, self._notified.set, close_seconds=close_seconds)
        self._num_tickets = 0

    def fetch(
        self, namespace: TierNamespace, hashes: Sequence[BlockHash], seconds: float = 5.0
    ) -> FetchResult:
        self._num_tickets += 1
        self.store.fetch(self._num_tickets, namespace, hashes, seconds)
        return self.result(self._num_tickets)

    def result(self, ticket: int) -> FetchResult:
        while True:
            self._notified.clear()
            for result in self.store.take_results():
                if result.ticket == ticket:
                    return result
            assert self._notified.wait(10), "no result within 10 s"

    def save(self, namespace: TierNamespace, hashes: list[BlockHash]) -> None:
        self.store.save(namespace, blocks(namespace, hashes))
        assert self.store.flush(10)


@contextmanager
def calling(*tiers: Tier) -> Iterator[Caller]:
    caller = Caller(*tiers)
    try:
        yield caller
    finally:
        caller.store.close()


def contents(namespace: TierNamespace, hashes: Sequence[BlockHash]) -> list[bytes]:
    return [content(namespace, block_hash) for block_hash in hashes]


NS = a_namespace()
HASHES = chain(NS, "a prompt", 20)


def test_what_was_saved_is_fetched_from_ram() -> None:
    with calling(RamTier(2**20)) as caller:
        caller.save(NS, HASHES)
        result = caller.fetch(NS, HASHES)
    assert result.blocks == tuple(contents(NS, HASHES))
    assert result.num_blocks_by_tier == {"ram": 20}
    assert not result.causes


def test_what_was_saved_survives_a_restart_on_disk(tmp_path: Path) -> None:
    with calling(RamTier(2**20), DiskTier(tmp_path, 2**20)) as caller:
        caller.save(NS, HASHES)
    with calling(RamTier(2**20), DiskTier(tmp_path, 2**20)) as caller:
        result = caller.fetch(NS, HASHES)
        assert result.blocks == tuple(contents(NS, HASHES))
        assert result.num_blocks_by_tier == {"disk": 20}
        assert caller.store.flush(5)
        assert caller.fetch(NS, HASHES).num_blocks_by_tier == {"ram": 20}


def a_lower_tier(name: str = "disk") -> FaultyTier:
    tier = RamTier(2**20)
    tier.name = name
    return FaultyTier(tier)


def figures(caller: Caller, tier: str) -> TierFigures:
    return next(one for one in caller.store.stats().tiers if one.tier == tier)


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < deadline, "not within 5 s"
        time.sleep(0.01)


# ── several tiers ───────────────────────────────────────────────────────────────────────────


def test_a_fetch_goes_through_the_tiers_and_back(tmp_path: Path) -> None:
    """RAM has the head and the tail, the disk what is between, and no tier the end."""
    disk = a_lower_tier()
    ram = RamTier(2**20)
    ram.save(NS, records(NS, HASHES[:5] + HASHES[12:15]))
    disk.save(NS, records(NS, HASHES[5:12]))
    with calling(ram, disk) as caller:
        result = caller.fetch(NS, HASHES)
        assert result.blocks == tuple(contents(NS, HASHES[:15]))
        assert result.num_blocks_by_tier == {"ram": 8, "disk": 7}
        assert result.causes == {"ram": Cause.ABSENT, "disk": Cause.ABSENT}
        assert (figures(caller, "ram").hits, figures(caller, "disk").hits) == (8, 7)
        assert figures(caller, "ram").hit_bytes == 8 * NS.block_bytes


def test_a_gap_ends_the_run() -> None:
    ram = RamTier(2**20)
    ram.save(NS, records(NS, HASHES[:5] + HASHES[6:]))
    with calling(ram) as caller:
        assert len(caller.fetch(NS, HASHES).blocks) == 5
        assert figures(caller, "ram").misses == {"absent": 15}


def test_whether_a_fetch_is_worth_waiting_for_is_told_at_once() -> None:
    with calling(RamTier(2**20)) as caller:
        assert not caller.store.may_have(NS, HASHES[0])
        caller.save(NS, HASHES)
        assert caller.store.may_have(NS, HASHES[0])
        assert not caller.store.may_have(NS, chain(NS, "other", 1)[0])


def test_a_cancelled_fetch_has_no_result() -> None:
    disk = a_lower_tier()
    disk.save(NS, records(NS, HASHES))
    disk.fault = "hang"
    with calling(disk) as caller:
        caller.store.fetch(7, NS, HASHES, 5.0)
        caller.store.cancel(7)
        disk.release()
        assert caller.store.flush(5)
        assert caller.fetch(NS, HASHES).blocks  # it came after the cancelled one
        assert caller.store.take_results() == []


def test_saves_beyond_the_queue_are_lost_and_counted() -> None:
    disk = a_lower_tier()
    disk.fault = "hang"
    large = a_namespace(block_bytes=40 * 2**20)
    payload = bytes(large.block_bytes)
    with calling(disk) as caller:
        for block_hash in chain(large, "p", 12):
            caller.store.save(large, [(block_hash, payload)])
        eventually(lambda: figures(caller, "disk").unsaved.get("queue_full", 0) > 0)
        disk.release()


def test_a_block_that_several_requests_computed_at_once_is_saved_once(tmp_path: Path) -> None:
    with calling(RamTier(2**20), DiskTier(tmp_path, 2**20)) as caller:
        for _ in range(3):
            caller.store.save(NS, blocks(NS, HASHES))
        assert caller.store.flush(10)
        assert figures(caller, "disk").num_saved == len(HASHES)
        num_bytes = figures(caller, "disk").contents.num_bytes
    assert num_bytes < 1.5 * len(HASHES) * record_bytes(NS)


def test_what_is_used_elsewhere_outlives_what_is_not(tmp_path: Path) -> None:
    size = record_bytes(NS)
    tiers = (RamTier(45 * size), DiskTier(tmp_path, 60 * size))
    with calling(*tiers) as caller:
        caller.save(NS, HASHES)
        for i in range(8):
            caller.store.touch(NS, HASHES)
            caller.save(NS, chain(NS, f"other {i}", 20))
        assert figures(caller, "disk").contents.num_evicted
        assert figures(caller, "ram").contents.num_evicted
        for tier in tiers:
            assert all(tier.holds(NS, block_hash) for block_hash in HASHES)


def test_noting_uses_waits_for_no_tier_and_takes_bounded_memory() -> None:
    disk = a_lower_tier()
    disk.fault = "hang"
    with calling(disk) as caller:
        caller.store.save(NS, blocks(NS, HASHES))
        eventually(lambda: disk.num_calls == 1)
        for _ in range(5000):
            caller.store.touch(NS, HASHES)
        disk.release()
        eventually(lambda: disk.num_calls > 1000)
        assert caller.store.flush(5)
        assert disk.num_calls <= 1100


# ── failures ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fault", ["error", "bug"])
def test_a_tier_that_fails_is_a_miss_and_is_left_alone_until_it_works(fault: str) -> None:
    disk = a_lower_tier()
    with calling(disk) as caller:
        caller.save(NS, HASHES)
        disk.fault = fault
        for _ in range(3):
            result = caller.fetch(NS, HASHES)
            assert (result.blocks, result.causes) == ((), {"disk": Cause.ERROR})
        num_calls = disk.num_calls
        assert caller.fetch(NS, HASHES).causes == {"disk": Cause.BREAKER}
        assert not caller.store.may_have(NS, HASHES[0])
        assert disk.num_calls == num_calls
        assert figures(caller, "disk").misses == {"error": 60, "breaker_open": 20}
        caller.store.not_asked(NS, HASHES[:5])
        assert figures(caller, "disk").misses == {"error": 60, "breaker_open": 25}
        assert figures(caller, "disk").load_breaker == "open"
        assert figures(caller, "disk").num_trips == 1
        disk.fault = ""
        eventually(lambda: caller.store.may_have(NS, HASHES[0]))
        assert caller.fetch(NS, HASHES).blocks == tuple(contents(NS, HASHES))
        assert figures(caller, "disk").load_breaker == "closed"
        caller.store.not_asked(NS, HASHES)
        assert figures(caller, "disk").misses == {"error": 60, "breaker_open": 25}


def test_a_tier_that_cannot_save_still_gives_what_it_has() -> None:
    disk = a_lower_tier()
    others = chain(NS, "others", 4)
    with calling(disk) as caller:
        caller.save(NS, HASHES)
        disk.fault = "error"
        for _ in range(4):
            caller.save(NS, others)
        assert figures(caller, "disk").unsaved == {"error": 12, "breaker_open": 4}
        assert figures(caller, "disk").save_breaker == "open"
        disk.fault = ""
        assert len(caller.fetch(NS, HASHES).blocks) == 20


def test_a_tier_that_hangs_costs_its_deadline_and_soon_nothing() -> None:
    disk = a_lower_tier()
    ram = RamTier(2**20)
    ram.save(NS, records(NS, HASHES[:5]))
    disk.save(NS, records(NS, HASHES))
    disk.fault = "hang"
    with calling(ram, disk) as caller:
        for _ in range(3):
            start = time.monotonic()
            result = caller.fetch(NS, HASHES, 0.05)
            assert 0.05 <= time.monotonic() - start < 4.0
            assert len(result.blocks) == 5  # what RAM had
            assert result.causes == {"ram": Cause.ABSENT, "disk": Cause.DEADLINE}
        start = time.monotonic()
        result = caller.fetch(NS, HASHES, 5.0)
        assert result.causes == {"ram": Cause.ABSENT, "disk": Cause.BREAKER}
        assert time.monotonic() - start < 4.0
        assert caller.store.stats().num_late == 3
        disk.release()
        eventually(lambda: len(caller.fetch(NS, HASHES).blocks) == 20)


def test_a_hanging_save_delays_no_fetch() -> None:
    disk = a_lower_tier()
    disk.save(NS, records(NS, HASHES))
    with calling(disk) as caller:
        disk.fault = "hang"
        caller.store.save(NS, blocks(NS, chain(NS, "others", 4)))
        eventually(lambda: disk.num_calls == 2)
        disk.fault = ""
        assert len(caller.fetch(NS, HASHES).blocks) == 20
        disk.release()


def test_closing_does_not_wait_for_a_tier_that_hangs() -> None:
    disk = a_lower_tier()
    disk.save(NS, records(NS, HASHES))
    disk.fault = "hang"
    caller = Caller(disk, close_seconds=0.2)
    caller.store.fetch(99, NS, HASHES, 60.0)
    start = time.monotonic()
    caller.store.close()
    assert time.monotonic() - start < 20.0
    assert caller.fetch(NS, HASHES).blocks == ()
    disk.release()
    eventually(lambda: not kv_threads())


def kv_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


def test_closing_leaves_no_thread_behind(tmp_path: Path) -> None:
    with calling(RamTier(2**20), DiskTier(tmp_path, 2**20)) as caller:
        caller.save(NS, HASHES)
        assert kv_threads()
    assert not kv_threads()


# ── forgetting ──────────────────────────────────────────────────────────────────────────────


def test_after_a_clear_nothing_from_before_is_found() -> None:
    disk = a_lower_tier()
    with calling(RamTier(2**20), disk) as caller:
        caller.save(NS, HASHES)
        disk.fault = "hang"  # so that clearing takes a while
        caller.store.drop(Drop(b"model"))
        assert not caller.store.may_have(NS, HASHES[0])
        assert caller.fetch(NS, HASHES).blocks == ()
        disk.release()
        assert caller.store.flush(5)
        assert caller.fetch(NS, HASHES).blocks == ()
        caller.save(NS, HASHES)
        assert len(caller.fetch(NS, HASHES).blocks) == 20


def test_dropping_an_adapter_takes_also_what_waits_to_be_saved() -> None:
    disk = a_lower_tier()
    old, new = a_namespace("n", "A"), a_namespace("n", "B")
    with calling(RamTier(2**20), disk) as caller:
        for space in (old, new):
            caller.store.save(space, blocks(space, chain(space, "p", 4)))
        caller.store.drop(Drop(b"model", "n", (new.digest, 0)))
        assert caller.store.flush(5)
        assert [len(caller.fetch(one, chain(one, "p", 4)).blocks) for one in (old, new)] == [0, 4]
        assert disk.contents().num_blocks == 4


def test_a_drop_that_fails_says_why_and_is_done_when_the_tier_works_again() -> None:
    disk = a_lower_tier()
    with calling(RamTier(2**20), disk) as caller:
        caller.save(NS, HASHES)
        disk.fault = "error"
        forgettings = [caller.store.drop(Drop(b"model", "n")) for _ in range(4)]
        assert caller.store.flush(5)
        for forgetting in forgettings:
            assert forgetting.is_settled
            assert forgetting.obstacles == {"disk": "a test made it fail"}
        disk.fault = ""
        eventually(lambda: not any(forgetting.obstacles for forgetting in forgettings))
        assert disk.contents().num_blocks == 0
        caller.save(NS, HASHES)
        assert len(caller.fetch(NS, HASHES).blocks) == 20, "what comes after it is found"


def test_a_drop_is_tried_at_once_though_saves_are_given_up_for_now() -> None:
    disk = a_lower_tier()
    with calling(disk) as caller:
        caller.save(NS, HASHES)
        disk.fault = "error"
        for _ in range(3):
            caller.save(NS, chain(NS, "others", 4))
        assert figures(caller, "disk").save_breaker == "open"
        disk.fault = ""
        forgetting = caller.store.drop(Drop(b"model", "n"))
        assert caller.store.flush(5)
        assert not forgetting.obstacles


@pytest.mark.parametrize("fault", ["hang", "error"])
def test_what_is_dropped_is_not_found_while_the_tier_still_has_it(fault: str) -> None:
    """A generation may come again after a restart, so only its blocks' absence keeps it away."""
    disk, other = a_lower_tier(), a_namespace("m")
    with calling(disk) as caller:
        for space in (NS, other):
            caller.save(space, chain(space, "a prompt", 20))
        disk.fault = fault
        forgetting = caller.store.drop(Drop(b"model", "n"))
        eventually(lambda: disk.num_calls >= 3)
        disk.fault = ""
        assert not caller.store.may_have(NS, HASHES[0])
        assert caller.fetch(NS, HASHES).blocks == ()
        assert len(caller.fetch(other, chain(other, "a prompt", 20)).blocks) == 20
        disk.release()
        eventually(lambda: not forgetting.obstacles)


def test_who_waits_for_a_drop_is_woken_when_the_last_tier_has_spoken() -> None:
    disk = a_lower_tier()
    disk.fault = "hang"
    notified = threading.Event()
    store = TieredStore([RamTier(2**20), disk], notified.set)
    forgetting = store.drop(Drop(b"model"))
    eventually(lambda: set(forgetting.obstacles) == {"disk"})
    assert not forgetting.is_settled
    assert not notified.is_set()
    disk.release()
    assert notified.wait(5)
    assert forgetting.is_settled
    assert not forgetting.obstacles
    store.close()


@pytest.mark.parametrize("lora_name", ["n", EVERYTHING])
def test_a_drop_that_is_confirmed_outlives_a_kill(
    tmp_path: Path, lora_name: str | Everything
) -> None:
    """The store is left as a killed process leaves it; another one opens the directory."""
    with calling(DiskTier(tmp_path, 2**20)) as killed:
        killed.save(NS, HASHES)
        forgetting = killed.store.drop(Drop(b"model", lora_name))
        eventually(lambda: not forgetting.obstacles)
        with calling(DiskTier(tmp_path, 2**20)) as caller:
            assert caller.fetch(NS, HASHES).blocks == ()


def test_what_was_fetched_before_a_drop_is_not_put_into_ram_after_it() -> None:
    disk, ram = a_lower_tier(), RamTier(2**20)
    disk.save(NS, records(NS, HASHES))
    disk.fault = "hang"
    with calling(ram, disk) as caller:
        caller.store.fetch(1, NS, HASHES, 5.0)
        caller.store.drop(Drop(b"model", "m"))
        disk.release()
        assert len(caller.result(1).blocks) == 20
        assert caller.store.flush(5)
        assert ram.contents().num_blocks == 0


# ── short memory ────────────────────────────────────────────────────────────────────────────


class ShortOfMemory(RamTier):
    """Has nothing, and cannot say what it lacks."""

    def may_hold(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        return False

    def holds(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        raise MemoryError


def test_what_cannot_be_encoded_for_one_tier_is_counted_and_the_others_get_theirs() -> None:
    disk = a_lower_tier()
    with calling(ShortOfMemory(2**20), disk) as caller:
        caller.save(NS, HASHES)
        assert figures(caller, "ram").unsaved == {"error": 20}
        assert disk.contents().num_blocks == 20


def test_what_cannot_be_put_into_the_first_tier_is_fetched_still() -> None:
    disk = a_lower_tier()
    disk.save(NS, records(NS, HASHES))
    with calling(ShortOfMemory(2**20), disk) as caller:
        assert caller.fetch(NS, HASHES).blocks == tuple(contents(NS, HASHES))
        assert figures(caller, "ram").unsaved == {"error": 20}


def test_readers_outlive_a_delivery_that_fails() -> None:
    def notify() -> None:
        raise MemoryError

    tier = RamTier(2**20)
    tier.save(NS, records(NS, HASHES))
    store = TieredStore([tier], notify)
    tickets = range(2 * tier.traits.num_readers)
    for ticket in tickets:
        store.fetch(ticket, NS, HASHES, 60.0)
    results: list[FetchResult] = []

    def are_all_there() -> bool:
        results.extend(store.take_results())
        return len(results) == len(tickets)

    eventually(are_all_there)
    store.close()
    assert {len(result.blocks) for result in results} == {20}


@pytest.mark.parametrize("num_failures", [1, 3])
def test_a_result_that_memory_is_too_short_for_comes_later(
    monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    failures = iter(range(num_failures))
    result = Fetch.result

    def failing_result(fetch: Fetch) -> FetchResult:
        if next(failures, None) is not None:
            raise MemoryError
        return result(fetch)

    monkeypatch.setattr(deadlines, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(Fetch, "result", failing_result)
    with calling(RamTier(2**20)) as caller:
        caller.save(NS, HASHES)
        assert len(caller.fetch(NS, HASHES, 0.2).blocks) == 20
        assert caller.store.stats().num_late == 1


# ── chance ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(4))
def test_tiers_that_fail_by_chance_give_only_right_blocks(seed: int) -> None:
    chance = random.Random(seed)
    lower = RamTier(40 * record_bytes(NS))
    lower.name = "disk"
    with calling(RamTier(20 * record_bytes(NS)), FaultyTier(lower, chance)) as caller:
        spaces = [a_namespace("n", version) for version in "AB"]
        num_blocks = 0
        for _ in range(150):
            space = chance.choice(spaces)
            hashes = chain(space, f"p{chance.randrange(4)}", chance.randrange(1, 12))
            match chance.randrange(8):
                case 0:
                    caller.store.drop(Drop(b"model", "n", chance.choice([None, (space.digest, 0)])))
                case 1 | 2 | 3:
                    caller.store.save(space, blocks(space, hashes))
                    caller.store.flush(chance.choice([0.0, 1.0]))
                case _:
                    result = caller.fetch(space, hashes)
                    num_blocks += len(result.blocks)
                    assert result.blocks == tuple(contents(space, hashes[: len(result.blocks)]))
        assert num_blocks
