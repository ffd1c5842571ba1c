"""The random lives of tests/test_traces.py where requests' steps verify drafts of their answers.

Some drafts are right, some wrong from one on. Each mutant breaks one rule of verifying.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lora_serve.fuzz.oracle import executor
from lora_serve.fuzz.oracle.executor import VOCAB_SIZE
from lora_serve.fuzz.oracle.expected import TraceResult
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.scheduler import progress
from lora_serve.scheduler.progress import take_in
from lora_serve.scheduler.request import Request
from lora_serve.step import RequestStepOutput, ScheduledRequest
from tests.fakes.drafting import DraftCounts, drafting, some_drafts

NUM_TRACES = 40

OVERLAPS = pytest.mark.parametrize(
    "async_scheduling", [False, True], ids=["one by one", "overlapped"]
)


def run_trace(seed: int, **settings: Any) -> tuple[TraceResult, DraftCounts]:
    rng = random.Random(f"drafts {seed}")
    trace: OracleTrace

    def drafts(request: Request) -> list[int]:
        answer = trace.expected[request.request_id].answer[request.num_output_tokens :]
        return some_drafts(answer, VOCAB_SIZE, rng)

    with drafting(drafts) as counts:
        trace = OracleTrace(seed, **settings)
        return trace.run(), counts


@OVERLAPS
def test_every_answer_of_every_drafted_trace_is_the_lone_answer(async_scheduling: bool) -> None:
    num_preemptions = num_hit_tokens = num_accepted = num_rejected = 0
    for seed in range(NUM_TRACES):
        result, counts = run_trace(seed, async_scheduling=async_scheduling)
        assert result.wrong == [], f"seed {seed}"
        num_preemptions += result.num_preemptions
        num_hit_tokens += result.num_hit_tokens
        num_accepted += counts.num_accepted
        num_rejected += counts.num_rejected
    assert num_preemptions > NUM_TRACES
    assert num_hit_tokens > 100 * NUM_TRACES
    # Where steps overlap, most last tokens are pending, and have no drafts behind them. Every fifth
    # request wants an embedding, which draws nothing.
    assert num_accepted > (20 if async_scheduling else 120) * NUM_TRACES
    assert num_rejected > (20 if async_scheduling else 120) * NUM_TRACES


def is_caught(num_traces: int = 40) -> bool:
    """Whether some trace gives a wrong answer, breaks an invariant, or ends the engine."""
    for seed in range(num_traces):
        try:
            if run_trace(seed)[0].wrong:
                return True
        except (AssertionError, LookupError, ValueError):
            return True
    return False


def accepts_all(sampled: Sequence[int], draft_token_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(sampled)


def goes_on_behind_the_first_that_differs(
    sampled: Sequence[int], draft_token_ids: Sequence[int]
) -> tuple[int, ...]:
    same = [token for token, draft in zip(sampled, draft_token_ids, strict=False) if token == draft]
    return (*same, *sampled[-1:])


@pytest.mark.parametrize("mutant", [accepts_all, goes_on_behind_the_first_that_differs])
def test_drafted_traces_catch_a_worker_that(
    mutant: Callable[..., tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "accepted", mutant)
    assert is_caught()


TakenIn = tuple[tuple[int, ...], str | None, int | None]


def offers_what_rejected_drafts_wrote(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> TakenIn:
    """Counts the last token as computed, where a draft stood in its place."""
    taken_in = take_in(request, chunk, result)
    if chunk.asked.num_drafts:
        request.num_computed_tokens = min(chunk.end, request.num_tokens)
        request.num_planned_tokens = request.num_computed_tokens
    return taken_in


def goes_on_behind_the_end(
    request: Request, chunk: ScheduledRequest, result: RequestStepOutput
) -> TakenIn:
    _, finish_reason, stop_token_id = take_in(request, chunk, result)
    return result.token_ids, finish_reason, stop_token_id


@pytest.mark.parametrize(
    "mutant",
    [offers_what_rejected_drafts_wrote, goes_on_behind_the_end],
)
def test_drafted_traces_catch_a_scheduler_that(
    mutant: Callable[..., TakenIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "take_in", mutant)
    assert is_caught()
