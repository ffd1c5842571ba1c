"""Random lives of engines of 2 to 6 ranks, and the bugs between ranks that they would catch.

Those of one rank are in test_traces.py. Everything between ranks is real: steps on their way,
gathers, shares of KV and of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs

from lora_serve.distributed.shares import RankPlace
from lora_serve.fuzz.oracle.tiered_traces import TieredTrace
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.identity import AdapterRef, NoAdapter
from lora_serve.step import KVLoad, SchedulerOutput
from lora_serve.worker.rank_shares import KVShares
from tests.fakes.oracle_ranks import OracleRank, RankedOracles
from tests.test_draft_model_traces import model_trace

SIZES = (2, 3, 4, 6)  # of the oracle's four KV heads
NUM_TRACES = len(SIZES)
NUM_TIERED_TRACES = 1
NUM_OPERATIONS = 120
MOST_TRACES = 20  # in which a fault that is put back must show


def test_every_answer_of_ranks_is_the_lone_answer() -> None:
    sizes, num_requests, num_preemptions = set[int](), 0, 0
    for seed in range(NUM_TRACES):
        with closing(RankedOracles(seed, SIZES)) as oracles:
            trace = OracleTrace(seed, executor_class=oracles, async_scheduling=seed % 4 > 1)
            result = trace.run()
            assert result.wrong == [], f"seed {seed}, {oracles.world_sizes} ranks"
            sizes |= set(oracles.world_sizes)
            num_requests += result.num_requests
            num_preemptions += result.num_preemptions
    assert sizes == {*SIZES}
    assert num_requests > 20 * NUM_TRACES
    assert num_preemptions > 0


def test_kv_that_some_ranks_stored_is_read_by_others() -> None:
    """Each engine over the same tiers has another number of ranks."""
    num_changes = num_tier_tokens = 0
    for seed in range(NUM_TIERED_TRACES):
        with closing(RankedOracles(seed)) as oracles:
            trace = TieredTrace(seed, executor_class=oracles, async_scheduling=seed % 2 == 1)
            assert trace.run(NUM_OPERATIONS).wrong == [], f"seed {seed}, {oracles.world_sizes}"
            sizes = oracles.world_sizes
            num_changes += sum(one != other for one, other in pairwise(sizes))
            num_tier_tokens += trace.tiered.num_tier_tokens
    assert num_changes > 1
    assert num_tier_tokens > 100 * NUM_TIERED_TRACES


def test_ranks_verify_what_a_draft_model_guesses() -> None:
    num_accepted, sizes = 0, (2, 3)
    for seed in range(len(sizes)):
        with closing(RankedOracles(seed, sizes)) as oracles:
            trace = model_trace(seed, executor_class=oracles, async_scheduling=seed % 2 == 1)
            assert trace.run().wrong == [], f"seed {seed}"
            num_accepted += trace.engine.core.scheduler.totals.num_accepted_tokens
    assert num_accepted > 40 * len(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(10_000, 11_000, 50))
def test_every_answer_of_ranks_in_many_traces_is_the_lone_answer(first_seed: int) -> None:
    for kind, num_operations in ((OracleTrace, 60), (TieredTrace, NUM_OPERATIONS)):
        for seed in range(first_seed, first_seed + 50):
            with closing(RankedOracles(seed)) as oracles:
                trace = kind(seed, executor_class=oracles, async_scheduling=seed % 2 == 1)
                assert trace.run(num_operations).wrong == [], f"seed {seed}"


# ── faults put in on purpose ────────────────────────────────────────────────────────────────────


def is_caught(rank: type[OracleRank] = OracleRank, trace: type[OracleTrace] = OracleTrace) -> bool:
    """Whether some trace gives a wrong answer or breaks an invariant. Other errors are no proof."""
    for seed in range(MOST_TRACES):
        with closing(RankedOracles(seed, (2, 4), rank)) as oracles:
            if oracles.is_wrong(trace(seed, executor_class=oracles).run):
                return True
    return False


class IsAStepBehind(OracleRank):
    """Does the requests of the step before once more, where these are as many rows."""

    _before = SchedulerOutput(0, ())

    def submit(self, step: SchedulerOutput) -> None:
        late, self._before = self._before, step
        sizes = [[r.num_tokens for r in each.requests] for each in (late, step)]
        if self._group.rank and sizes[0] == sizes[1]:
            step = structs.replace(step, requests=late.requests)
        super().submit(step)


class HasNoAdapters(OracleRank):
    def _digest(self, adapter: AdapterRef | NoAdapter) -> bytes:
        return super()._digest(adapter) if self._group.rank == 0 else b""


class GathersInAnotherOrder(OracleRank):
    def _whole(self, parts: list[bytes]) -> list[bytes]:
        half = len(parts[0]) if parts else 0
        return [whole[half:] + whole[:half] for whole in super()._whole(parts)]


class WritesTheKVOfOtherHeads(OracleRank):
    """What it stores is another rank's share; what it computes is its own."""

    def _own(self, contents: bytes) -> bytes:
        place, own = self._place, super()._own
        if len(contents) > 16:
            self._place = replace(place, rank=(place.rank + 1) % place.world_size)
        try:
            return own(contents)
        finally:
            self._place = place


class Stumbles(OracleRank):
    """Ends by an error that says nothing of answers."""

    def submit(self, step: SchedulerOutput) -> None:
        if self._group.rank:
            raise TypeError("a mistake in the mutant")
        super().submit(step)


def test_a_mutant_that_merely_stumbles_is_not_caught() -> None:
    with pytest.raises(TypeError, match="a mistake in the mutant"):
        is_caught(Stumbles)


@pytest.mark.parametrize(
    "mutant",
    [IsAStepBehind, HasNoAdapters, GathersInAnotherOrder, WritesTheKVOfOtherHeads],
)
def test_traces_catch_a_rank_that(mutant: type[OracleRank]) -> None:
    assert is_caught(mutant)


def test_traces_catch_stored_kv_that_is_given_to_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split = KVShares.split

    def of_the_next(
        shares: KVShares, loads: Sequence[KVLoad], place: RankPlace
    ) -> tuple[KVLoad, ...]:
        rank = (place.rank + 1) % place.world_size
        return split(shares, loads, replace(place, rank=rank))

    monkeypatch.setattr(KVShares, "split", of_the_next)
    assert is_caught(trace=TieredTrace)
