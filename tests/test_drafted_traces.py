"""The random lives of tests/test_traces.py where requests' steps verify drafts of their answers.

Some drafts are right, some wrong from one on; others come from the drafters that users may ask for.
Each mutant breaks one rule of verifying, or of who is offered what.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from lora_serve.config import SpeculativeConfig
from lora_serve.fuzz.oracle import executor, traces
from lora_serve.fuzz.oracle.content import VOCAB_SIZE
from lora_serve.fuzz.oracle.expected import TraceResult
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.identity import BASE_MODEL
from lora_serve.scheduler import chunk, drafting, progress
from lora_serve.scheduler.progress import take_in_drafts
from lora_serve.scheduler.request import Request
from lora_serve.speculation.base import Origin
from lora_serve.step import RequestStepOutput, SampleInput, ScheduledRequest, SeenTokens
from tests.fakes.drafting import DraftCounts, some_drafts
from tests.fakes.drafting import drafting as made_up_drafts

NUM_TRACES = 20
SAMPLE_INPUT = chunk._sample_input

OVERLAPS = pytest.mark.parametrize(
    "async_scheduling", [False, True], ids=["one by one", "overlapped"]
)


def speculation(config: SpeculativeConfig) -> AbstractContextManager[object]:
    """Traces that are made meanwhile speculate so, whatever rows cost."""

    def drawn_costs(rng: random.Random) -> None:
        return None

    def drawn(rng: random.Random) -> SpeculativeConfig:
        return config

    return mock.patch.multiple(traces, drawn_speculation=drawn, drawn_row_costs=drawn_costs)


def run_trace(seed: int, **settings: Any) -> tuple[TraceResult, DraftCounts]:
    rng = random.Random(f"drafts {seed}")
    trace: OracleTrace

    def drafts(request: Request) -> list[int]:
        answer = trace.expected[request.request_id].answer[request.num_output_tokens :]
        return some_drafts(answer, VOCAB_SIZE, rng)

    many = SpeculativeConfig(speculative_max_step_rows=64)  # for made-up ones
    with made_up_drafts(drafts) as counts, speculation(many):
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
    assert num_hit_tokens > 70 * NUM_TRACES
    # Where steps overlap, most last tokens are pending, and have no drafts behind them. Every fifth
    # request wants an embedding, which draws nothing.
    assert num_accepted > (20 if async_scheduling else 120) * NUM_TRACES
    assert num_rejected > (20 if async_scheduling else 120) * NUM_TRACES


def is_caught(num_traces: int = NUM_TRACES) -> bool:
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
    request: Request, scheduled: ScheduledRequest, result: RequestStepOutput
) -> TakenIn:
    """Counts the last token as computed, where a draft stood in its place."""
    taken_in = take_in_drafts(request, scheduled, result)
    request.num_computed_tokens = min(scheduled.end, request.num_tokens)
    request.num_scheduled_tokens = request.num_computed_tokens
    return taken_in


def goes_on_behind_the_end(
    request: Request, scheduled: ScheduledRequest, result: RequestStepOutput
) -> TakenIn:
    _, finish_reason, stop_token_id = take_in_drafts(request, scheduled, result)
    return result.token_ids, finish_reason, stop_token_id


@pytest.mark.parametrize(
    "mutant",
    [offers_what_rejected_drafts_wrote, goes_on_behind_the_end],
)
def test_drafted_traces_catch_a_scheduler_that(
    mutant: Callable[..., TakenIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "take_in_drafts", mutant)
    assert is_caught()


def forgets_the_drafts_before(
    request: Request,
    position: int,
    drafts: Sequence[int] = (),
    seen: SeenTokens | None = None,
) -> SampleInput:
    """Bans what bad words ban behind the last token that is known."""
    return SAMPLE_INPUT(request, position)


def test_drafted_traces_catch_rows_that_are_sampled_as_if_no_draft_were_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk, "_sample_input", forgets_the_drafts_before)
    assert is_caught()


# ── what the drafters offer ──────────────────────────────────────────────────────────────────


def suffix_trace(seed: int) -> OracleTrace:
    """A trace where past answers are drafts."""
    speculative = SpeculativeConfig(
        speculative_method="suffix", speculative_suffix_decoding_max_spec_factor=4.0
    )
    with speculation(speculative):
        return OracleTrace(seed)


def test_what_others_were_told_is_no_draft() -> None:
    num_accepted = 0
    for seed in range(NUM_TRACES):
        trace = suffix_trace(seed)
        assert trace.run().wrong == [], f"seed {seed}"
        num_accepted += trace.engine.core.scheduler.totals.num_accepted_tokens
    assert num_accepted > 10 * NUM_TRACES


def run_suffix_traces() -> None:
    for seed in range(NUM_TRACES):
        suffix_trace(seed).run()


def of_any_tenant(request: Request) -> Origin:
    return Origin(request.namespace)


def of_any_salt(request: Request) -> Origin:
    return Origin(replace(request.namespace, cache_salt=""), request.tenant)


def of_any_version(request: Request) -> Origin:
    return Origin(replace(request.namespace, adapter=BASE_MODEL), request.tenant)


@pytest.mark.parametrize("mutant", [of_any_tenant, of_any_salt, of_any_version])
def test_drafted_traces_catch_a_drafter_that_offers_answers(
    mutant: Callable[[Request], Origin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "_origin", mutant)
    with pytest.raises(AssertionError, match="none of its own"):
        run_suffix_traces()
