"""The random lives of tests/test_traces.py and test_tiered_traces.py where steps overlap.

Each step is scheduled before the one before it has run: the oracle runs it when it is collected, as
late as a device ever may. Each mutant breaks one rule that overlapping needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from msgspec import structs

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.executor import OracleExecutor
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.fuzz.oracle.tier_store import Faults, OracleTierStore
from lora_serve.fuzz.oracle.tiered_traces import TieredTrace
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.kv.manager import BlockHolder, KVCacheManager
from lora_serve.messages import AbortRequests
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.in_flight import ScheduledPair, StepsInFlight
from lora_serve.scheduler.request import Request, RequestStatus
from lora_serve.step import ScheduledRequest, SchedulerOutput
from tests.test_traces import OffersWhenAdmitted

NUM_TRACES = 15
NUM_TIERED_TRACES = 12
NUM_OPERATIONS = 200  # of a tiered trace


def num_awaiting(engine: OracleEngine) -> int:
    """Rows whose token was drawn by the step before and not known to the host."""
    steps = engine.executor.steps
    return sum(chunk.token_from is not None for step in steps for chunk in step.requests)


def test_every_answer_of_every_overlapped_trace_is_the_lone_answer() -> None:
    num_requests = num_preemptions = num_rows_ahead = num_hit_tokens = 0
    for seed in range(NUM_TRACES):
        trace = OracleTrace(seed, async_scheduling=True)
        result = trace.run()
        assert result.wrong == [], f"seed {seed}"
        num_requests += result.num_requests
        num_preemptions += result.num_preemptions
        num_hit_tokens += result.num_hit_tokens
        num_rows_ahead += num_awaiting(trace.engine)
    assert num_requests > 20 * NUM_TRACES
    assert num_preemptions > NUM_TRACES
    assert num_hit_tokens > 100 * NUM_TRACES
    assert num_rows_ahead > 200 * NUM_TRACES


def test_every_answer_of_every_overlapped_trace_over_failing_tiers_is_the_lone_answer() -> None:
    num_tier_tokens = num_preemptions = 0
    for seed in range(NUM_TIERED_TRACES):
        trace = TieredTrace(seed, async_scheduling=True)
        result = trace.run(NUM_OPERATIONS)
        assert result.wrong == [], f"seed {seed}"
        num_preemptions += result.num_preemptions
        num_tier_tokens += trace.tiered.num_tier_tokens
    assert num_tier_tokens > 200 * NUM_TIERED_TRACES
    assert num_preemptions > NUM_TIERED_TRACES


@pytest.mark.slow
def test_every_answer_of_many_overlapped_traces_is_the_lone_answer() -> None:
    for seed in range(10_000, 25_000):
        assert OracleTrace(seed, async_scheduling=True).run().wrong == [], f"seed {seed}"
    for seed in range(10_000, 15_000):
        tiered = TieredTrace(seed, async_scheduling=True).run(NUM_OPERATIONS)
        assert tiered.wrong == [], f"seed {seed}"


def is_caught(make: Callable[[int], OracleTrace], first_seed: int = 0) -> bool:
    """Whether some trace gives a wrong answer, breaks an invariant, or ends the engine.

    first_seed: those before it are known to catch nothing.
    """
    for seed in range(first_seed, first_seed + 40):
        try:
            if make(seed).run().wrong:
                return True
        except (AssertionError, LookupError, ValueError):
            return True
    return False


class CommitsWhatIsInFlight(KVCacheManager):
    """Offers blocks when the step that writes them has been scheduled."""

    def commit(self, holder: BlockHolder, num_computed_tokens: int) -> range:
        assert isinstance(holder, Request)
        num_hashed = len(holder.block_hashes) * self.block_size
        return super().commit(holder, min(holder.num_scheduled_tokens, num_hashed))


@pytest.mark.parametrize("mutant", [OffersWhenAdmitted, CommitsWhatIsInFlight])
def test_overlapped_traces_catch_a_kv_manager_that(mutant: type[KVCacheManager]) -> None:
    assert is_caught(lambda seed: OracleTrace(seed, kv_class=mutant, async_scheduling=True))


class TakesAnotherRowsToken(OracleExecutor):
    def _token_ids(self, request: ScheduledRequest) -> Sequence[int]:
        if request.token_from is not None:
            request = msgspec.structs.replace(request, token_from=0)
        return super()._token_ids(request)


class DropsAdaptersWhenSubmitted(OracleExecutor):
    """Gives an adapter's memory away while a step in flight names it."""

    def submit(self, step: SchedulerOutput) -> None:
        self._active -= set(step.drop_adapters)
        super().submit(step)


@pytest.mark.parametrize(
    ("mutant", "first_seed"), [(TakesAnotherRowsToken, 0), (DropsAdaptersWhenSubmitted, 23)]
)
def test_overlapped_traces_catch_a_worker_that(
    mutant: type[OracleExecutor], first_seed: int
) -> None:
    assert is_caught(
        lambda seed: OracleTrace(seed, executor_class=mutant, async_scheduling=True), first_seed
    )


class ForgetsPlaces(StepsInFlight):
    """Every request's token is looked for where the first one's stands."""

    def begin(self, pairs: Sequence[ScheduledPair]) -> int:
        step_id = super().begin(pairs)
        for request, _ in pairs:
            request.step_index = 0
        return step_id


class ReportsDiscardedRows(StepsInFlight):
    """Reports a row that was computed after its request's end."""

    def finish(self, step_id: int) -> Sequence[ScheduledPair]:
        pairs = super().finish(step_id)
        for request, _ in pairs:
            request.status = RequestStatus.RUNNING
        return pairs


@pytest.mark.parametrize("mutant", [ForgetsPlaces, ReportsDiscardedRows])
def test_overlapped_traces_catch_a_scheduler_that(mutant: type[StepsInFlight]) -> None:
    class MutantTrace(OracleTrace):
        def _new_engine(self) -> OracleEngine:
            engine = super()._new_engine()
            engine.core.scheduler._in_flight = mutant()
            return engine

    assert is_caught(lambda seed: MutantTrace(seed, async_scheduling=True))


class LoadsWhenSubmitted(OracleExecutor):
    """Reuses blocks before the step in flight, which writes them for a request that has left."""

    def submit(self, step: SchedulerOutput) -> None:
        for load in step.kv_loads:
            self.scatter(load)
        super().submit(structs.replace(step, kv_loads=()))


def answers_right(executor_class: type[OracleExecutor], abort_at: int) -> bool:
    """A request leaves while its sixteenth token is in flight; its block is filled for another."""
    store = OracleTierStore()
    fetched = [*range(300, 316), 5]
    before = OracleEngine(store=store)
    before.add("stores it", fetched)
    before.run()
    store = store.restarted()
    store.faults = Faults(delay=2)
    engine = OracleEngine(async_scheduling=True, executor_class=executor_class, store=store)
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    engine.add("goes on", [100, 101], params=params)
    engine.add("leaves", [*range(200, 211)], params=params)
    for step in range(12):
        if step == abort_at - 3:
            engine.add("comes", fetched)
        if step == abort_at:
            engine.core.handle(AbortRequests(("leaves",)))
        engine.step()
    engine.run()
    assert engine.num_cached("comes") == 16
    return engine.tokens("comes") == lone_answer(fetched, b"", 4)


def test_a_block_is_filled_behind_the_step_that_still_writes_it() -> None:
    times = range(4, 11)
    assert all(answers_right(OracleExecutor, abort_at) for abort_at in times)
    assert not all(answers_right(LoadsWhenSubmitted, abort_at) for abort_at in times)
