"""Random pauses in the random lives of tests/test_traces.py, and bugs of pauses put back."""

from __future__ import annotations

import pytest

from lora_serve.engine.core.admin import AdminCalls
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.messages import CallReply, Pause, Resume
from lora_serve.scheduler.pause import PauseState, SchedulerPause
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler

NUM_TRACES = 20
LONG = [10 + i % 400 for i in range(200)]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_answer_of_every_trace_with_pauses_is_the_lone_answer(async_scheduling: bool) -> None:
    num_pauses = 0
    for seed in range(NUM_TRACES):
        trace = OracleTrace(seed, async_scheduling=async_scheduling)
        assert trace.run().wrong == [], f"seed {seed}"
        num_pauses += trace.result.num_pauses
    assert num_pauses > NUM_TRACES


class LosesHeldRequests(SchedulerPause):
    def enter(self, state: PauseState) -> list[Request]:
        super().enter(state)
        return []


class GoesOnWhilePaused(SchedulerPause):
    @property
    def is_paused(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("mutant", "first_seed"), [(LosesHeldRequests, 17), (GoesOnWhilePaused, 0)]
)
def test_traces_catch_a_pause_that(mutant: type[SchedulerPause], first_seed: int) -> None:
    class MutantTrace(OracleTrace):
        def _new_engine(self) -> OracleEngine:
            engine = super()._new_engine()
            engine.core.scheduler._pause = mutant()
            return engine

    assert is_caught(MutantTrace, first_seed)


class FreesKeptBlocks(Scheduler):
    """A pause gives the blocks of the youngest running request to others."""

    def pause(self, *, drains: bool) -> None:
        super().pause(drains=drains)
        if self._running and not self._in_flight:
            self._kv.free(self._running.in_order[-1])


class IsAtRestAtOnce(Scheduler):
    """A pause is confirmed while requests that have begun go on."""

    @property
    def is_at_rest(self) -> bool:
        return self._pause.state is not PauseState.NONE


@pytest.mark.parametrize("mutant", [FreesKeptBlocks, IsAtRestAtOnce])
def test_traces_catch_a_scheduler_that(mutant: type[Scheduler]) -> None:
    class MutantTrace(OracleTrace):
        def _new_engine(self) -> OracleEngine:
            engine = super()._new_engine()
            engine.core.scheduler.__class__ = mutant
            return engine

    assert is_caught(MutantTrace)


class ForgetsPausesThatAreCutShort(AdminCalls):
    def _resume(self) -> None:
        self._scheduler.resume()
        self._pauses = []


def test_traces_catch_a_resume_that_leaves_a_pause_unanswered() -> None:
    class MutantTrace(OracleTrace):
        def _new_engine(self) -> OracleEngine:
            engine = super()._new_engine()
            engine.core._admin.__class__ = ForgetsPausesThatAreCutShort
            return engine

    assert is_caught(MutantTrace)


def is_caught(trace_class: type[OracleTrace], first_seed: int = 0) -> bool:
    """first_seed: those before it are known to catch nothing."""
    for seed in range(first_seed, first_seed + 40):
        try:
            if trace_class(seed).run().wrong:
                return True
        except (AssertionError, LookupError, ValueError):
            return True
    return False


def test_kept_requests_go_on_where_they_stood() -> None:
    engine = OracleEngine()
    engine.add("a", LONG, max_tokens=8)
    for _ in range(6):
        engine.step()
    num_tokens, num_computed = len(engine.tokens("a")), engine.executor.num_computed_tokens
    engine.handle(Pause(1, "keep"))
    engine.add("b", LONG[:20])
    for _ in range(5):
        assert not engine.step()
    assert engine.calls[1] == CallReply(1)
    assert len(engine.tokens("a")) == num_tokens
    assert engine.executor.num_computed_tokens == num_computed
    engine.handle(Resume(2))
    engine.run()
    assert engine.executor.num_computed_tokens == 200 + 7 + 20 - 16 + 3  # nothing twice
    assert len(engine.tokens("a")) == 8


def test_a_replaced_adapters_kept_request_ends_with_the_version_it_began_with() -> None:
    engine = OracleEngine()
    engine.load("red", "/red", "old")
    engine.step()
    engine.add("kept", LONG[:40], lora_name="red", max_tokens=8)
    engine.step()
    engine.handle(Pause(100, "keep"))
    engine.load("red", "/red", "new", inplace=True)
    engine.step()
    engine.add("later", LONG[:40], lora_name="red", max_tokens=8)
    engine.handle(Resume(101))
    engine.run()
    kept, later = engine.last("kept").adapter, engine.last("later").adapter
    assert kept != later
    assert {output.adapter for output in engine.outputs["kept"]} == {kept}


def test_a_wait_lets_end_what_has_begun_and_holds_the_rest() -> None:
    engine = OracleEngine(max_num_seqs=1)
    for name in ("running", "queued"):
        engine.add(name, LONG[:20], max_tokens=5)
    engine.step()
    engine.handle(Pause(1, "wait"))
    engine.add("late", LONG[:20])
    for _ in range(4):
        engine.step()
        assert 1 not in engine.calls
    engine.step()
    assert 1 in engine.calls
    assert engine.last("running").finish_reason == "length"
    assert {"queued", "late"}.isdisjoint(engine.outputs)
    engine.handle(Resume(2))
    engine.run()
    assert engine.last("queued").finish_reason == engine.last("late").finish_reason == "length"


def test_no_request_that_has_begun_gives_way_to_one_that_a_pause_holds() -> None:
    engine = OracleEngine(max_num_seqs=2, fair_share="key")
    for name, prompt in (("one", LONG[:20]), ("two", LONG[20:40])):
        engine.add(name, prompt, max_tokens=10, tenant="a")
    engine.step()
    assert engine.core.scheduler.num_running == 2
    engine.handle(Pause(1, "wait"))
    engine.add("other", LONG[:20], tenant="b")
    while 1 not in engine.calls:
        engine.step()
    assert engine.core.scheduler.totals.num_preemptions == 0
    engine.handle(Resume(2))
    engine.run()
    assert engine.last("other").finish_reason == "length"


@pytest.mark.parametrize("later", [Resume(2), Pause(2, "keep")])
def test_a_wait_that_ends_before_the_requests_says_so(later: Resume | Pause) -> None:
    engine = OracleEngine()
    engine.add("running", LONG[:20], max_tokens=50)
    engine.step()
    engine.handle(Pause(1, "wait"))
    engine.step()
    engine.handle(later)
    error = engine.calls[1].error
    assert error is not None
    assert error.kind == "PauseEndedError"
    engine.step()
    assert engine.calls[2].error is None
    engine.handle(Resume(3))
    engine.run()
    assert engine.last("running").finish_reason == "length"
