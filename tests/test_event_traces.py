"""Random lives of an engine whose KV events an indexer reads, and the bugs that it would see.

At the end of each step the indexer knows exactly what a new request would find, over replaced and
unloaded adapters, resets, evictions, restarts, and messages for which there was no room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from lora_serve.fuzz.oracle.tiered_traces import TieredTrace
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.kv.event_recorder import KVEventRecorder
from lora_serve.kv.manager import BlockHolder, CacheHit, KVCacheManager
from lora_serve.kv.tier_copies import TierCopies, Version

NUM_TRACES = 10
NUM_TIERED_TRACES = 4
NUM_TIERED_OPERATIONS = 150

MakeTrace = Callable[[int], OracleTrace]


def run_traces(seeds: Sequence[int], make: MakeTrace, num_operations: int) -> Counter[str]:
    """How many events of each kind there were."""
    num_events: Counter[str] = Counter()
    for seed in seeds:
        trace = make(seed)
        assert trace.run(num_operations).wrong == []
        num_events += trace.settings["indexer"].num_events
    return num_events


def plain(seed: int) -> OracleTrace:
    return OracleTrace(seed, async_scheduling=seed % 2 == 1, recorder_class=KVEventRecorder)


def test_an_indexer_knows_exactly_what_would_be_found() -> None:
    num_events = run_traces(range(NUM_TRACES), plain, 60)
    assert num_events["BlockStored"] > 40 * NUM_TRACES
    assert num_events["BlockRemoved"] > 15 * NUM_TRACES
    assert num_events["AllBlocksCleared"] > NUM_TRACES


def test_an_indexer_knows_what_the_tiers_hold_of_it() -> None:
    make = partial(TieredTrace, recorder_class=KVEventRecorder)
    num_events = run_traces(range(NUM_TIERED_TRACES), make, NUM_TIERED_OPERATIONS)
    assert num_events["BlockStored"] > 200 * NUM_TIERED_TRACES


@pytest.mark.slow
def test_an_indexer_knows_exactly_what_would_be_found_in_many_traces() -> None:
    run_traces(range(10_000, 15_000), plain, 60)
    run_traces(range(10_000, 12_000), partial(TieredTrace, recorder_class=KVEventRecorder), 200)


def is_caught(make: MakeTrace, num_operations: int, num_traces: int = 40) -> bool:
    for seed in range(num_traces):
        try:
            make(seed).run(num_operations)
        except AssertionError:
            return True
    return False


class TakesNothingBack(KVEventRecorder):
    """Does not take back the blocks of a version that was replaced."""

    def _take_back(self, version: Version) -> None:
        pass


class TellsNothingAgain(KVEventRecorder):
    """Does not tell again of a version to which a name goes back."""

    def _tell_all(self, version: Version) -> None:
        pass


class TellsOfNoEviction(KVEventRecorder):
    def removed(self, *_: object) -> None:
        pass


class TellsOfEveryVersion(KVEventRecorder):
    """Also tells of blocks that requests of a replaced version still commit."""

    def _is_told(self, version: Version) -> bool:
        return True


@pytest.mark.parametrize(
    "mutant", [TakesNothingBack, TellsNothingAgain, TellsOfNoEviction, TellsOfEveryVersion]
)
def test_traces_catch_a_recorder_that(mutant: type[KVEventRecorder]) -> None:
    assert is_caught(partial(OracleTrace, recorder_class=mutant), 60)


class TellsBeforeCommit(KVCacheManager):
    """Tells of blocks when they are scheduled, before the step that writes them has run."""

    def admit(self, holder: BlockHolder, hit: CacheHit, num_found: int, num_tokens: int) -> bool:
        if not super().admit(holder, hit, num_found, num_tokens):
            return False
        assert self._events is not None, "this trace has an indexer"
        for index in range(hit.num_blocks, num_tokens // self.block_size):
            self._events.stored(holder, index, 0)
        return True


def test_traces_catch_a_manager_that_tells_before_the_commit() -> None:
    make = partial(OracleTrace, kv_class=TellsBeforeCommit, recorder_class=KVEventRecorder)
    assert is_caught(make, 60)


def test_traces_catch_tiers_whose_removals_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierCopies, "_removed", lambda *_: None)
    make = partial(TieredTrace, recorder_class=KVEventRecorder)
    assert is_caught(make, NUM_TIERED_OPERATIONS)
