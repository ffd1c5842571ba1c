"""The random lives of tests/test_traces.py, of which every fifth request wants embeddings, and
the bugs that the traces would catch. Each mutant puts one back.
"""

from __future__ import annotations

import pytest

from lora_serve.fuzz.oracle.executor import OracleExecutor
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.pooling import PoolingParams
from lora_serve.scheduler import chunk, progress
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.step import AskedOutputs

NUM_TRACES = 15

OVERLAPS = pytest.mark.parametrize(
    "async_scheduling", [False, True], ids=["one by one", "overlapped"]
)


@OVERLAPS
def test_every_embedding_is_the_one_that_a_lone_server_gives(async_scheduling: bool) -> None:
    num_means = num_last = num_of_tokens = num_chunks_of_means = num_hit_tokens = 0
    for seed in range(NUM_TRACES):
        trace = OracleTrace(seed, async_scheduling=async_scheduling)
        assert trace.run().wrong == [], f"seed {seed}"
        chunks = [each for step in trace.engine.executor.steps for each in step.requests]
        summed = [each for each in chunks if each.asked.sums_hidden]
        pooled = {each.request_id for each in chunks if each.asked.num_pooled}
        num_means += len({each.request_id for each in summed})
        num_chunks_of_means += len(summed)
        of_tokens = {each.request_id for each in chunks if each.asked.num_pooled > 1}
        num_of_tokens += len(of_tokens)
        num_last += len(pooled - of_tokens)
        num_hit_tokens += sum(trace.engine.num_cached(request_id) for request_id in pooled)
    assert num_last > NUM_TRACES
    assert num_means > NUM_TRACES
    assert num_of_tokens > NUM_TRACES
    assert num_chunks_of_means > 2 * num_means
    assert num_hit_tokens > 10 * NUM_TRACES


def is_caught(
    async_scheduling: bool = False, executor: type = OracleExecutor, first_seed: int = 0
) -> bool:
    """Whether some trace gives a wrong embedding, breaks an invariant, or ends the engine.

    first_seed: of a trace that found it when the test was written, where few do.
    """
    for seed in [*range(first_seed, 100), *range(first_seed)]:
        try:
            trace = OracleTrace(seed, executor_class=executor, async_scheduling=async_scheduling)
            if trace.run().wrong:
                return True
        except (AssertionError, ValueError):
            return True
    return False


@OVERLAPS
def test_traces_catch_a_sum_that_begins_again_with_each_chunk(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_sums(request: Request, sums: bytes) -> None:
        request.hidden_sums = sums

    monkeypatch.setattr(Request, "add_hidden_sums", replace_sums)
    assert is_caught(async_scheduling)


@pytest.mark.parametrize(("name", "first_seed"), [("hidden_sums", 61), ("hidden_rows", 77)])
def test_traces_catch_what_a_preempted_request_keeps(
    name: str, first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempt = Scheduler._preempt

    def preempt_keeping(self: Scheduler, victim: Request) -> None:
        kept = getattr(victim, name)
        preempt(self, victim)
        setattr(victim, name, kept)

    monkeypatch.setattr(Scheduler, "_preempt", preempt_keeping)
    assert is_caught(first_seed=first_seed)


def test_traces_catch_hidden_states_without_those_of_cached_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_mean = property(lambda params: params.pooling_type == "MEAN")
    monkeypatch.setattr(PoolingParams, "needs_all_rows", is_mean)
    assert is_caught()


def test_traces_catch_a_mean_without_the_cached_part(monkeypatch: pytest.MonkeyPatch) -> None:
    findable = property(lambda request: request.num_tokens - 1)
    monkeypatch.setattr(Request, "num_findable_tokens", findable)
    assert is_caught()


def test_traces_catch_a_prompt_of_which_nothing_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Request, "num_findable_tokens", property(lambda each: each.num_tokens))
    assert is_caught()


def test_traces_catch_an_embedding_that_is_told_before_the_prompts_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        chunk, "_pooling_asked", lambda pooling, num_tokens, is_last: AskedOutputs(num_pooled=1)
    )
    finish_after = progress.finish_after

    def end_at_once(request: Request) -> tuple[str | None, int | None]:
        return finish_after(request) if request.pooling is None else ("stop", None)

    monkeypatch.setattr(progress, "finish_after", end_at_once)
    assert is_caught()


class PoolsTheFirstRow(OracleExecutor):
    def _pooled(self, contents: list[tuple[bytes, ...]], num_pooled: int) -> bytes:
        return b"".join(map(b"".join, contents[:num_pooled]))


def test_traces_catch_the_hidden_state_of_another_row() -> None:
    assert is_caught(executor=PoolsTheFirstRow)
