"""The random lives of tests/test_traces.py where a draft model guesses how answers go on.

No answer tells what a guess was made of, so the oracle holds each guess against what its draft
model, alone with the request's own text, says. Each mutant breaks a rule that this hangs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lora_serve.config import SpeculativeConfig
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.scheduler.drafting import Drafting
from lora_serve.scheduler.request import Request
from lora_serve.speculation.draft_model import DraftModelDrafter, DraftModelRequest
from tests.test_drafted_traces import OVERLAPS, speculation

NUM_TRACES = 10


def model_trace(seed: int, **settings: Any) -> OracleTrace:
    speculative = SpeculativeConfig(
        speculative_model="the oracle's", speculative_num_speculative_tokens=8
    )
    with speculation(speculative):
        return OracleTrace(seed, **settings)


def drafter_of(trace: OracleTrace) -> DraftModelDrafter:
    drafting = trace.engine.core.scheduler._drafting
    assert drafting is not None
    assert drafting._draft_model is not None
    return drafting._draft_model


@OVERLAPS
def test_every_answer_is_the_lone_answer_and_every_guess_of_its_own_text(
    async_scheduling: bool,
) -> None:
    num_accepted = num_preemptions = 0
    for seed in range(NUM_TRACES):
        trace = model_trace(seed, async_scheduling=async_scheduling)
        result = trace.run()
        assert result.wrong == [], f"seed {seed}"
        num_accepted += trace.engine.core.scheduler.totals.num_accepted_tokens
        num_preemptions += result.num_preemptions
        drafter = drafter_of(trace)
        assert drafter.num_free_blocks == trace.engine.num_blocks // 2
    assert num_accepted > 40 * NUM_TRACES
    assert num_preemptions > NUM_TRACES // 2


def offers_what_a_rejection_overtook(self: DraftModelRequest, most: int) -> Sequence[int]:
    return self._drafts[:most]


def keeps_the_kv_of_rejected_guesses(self: DraftModelRequest, token_ids: Sequence[int]) -> int:
    num_new = len(token_ids) - self.num_computed
    self.num_computed += min(num_new, len(self.fed))
    self.fed = ()
    return len(token_ids) - self.num_computed


@pytest.mark.parametrize(
    ("method", "mutant"),
    [
        ("draft", offers_what_a_rejection_overtook),
        ("num_lacking", keeps_the_kv_of_rejected_guesses),
    ],
)
def test_traces_catch_a_draft_models_request_that(
    method: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftModelRequest, method, mutant)
    with pytest.raises(AssertionError, match="drafts of another text"):
        run_traces()


def test_traces_catch_guesses_that_were_made_for_another_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, last = Drafting.guessed, list[tuple[int, ...]]()

    def guessed(self: Drafting, request: Request, drafts: tuple[int, ...]) -> None:
        last.append(drafts)
        right(self, request, last[-2] if len(last) > 1 else drafts)

    monkeypatch.setattr(Drafting, "guessed", guessed)
    with pytest.raises(AssertionError, match="drafts of another text"):
        run_traces()


def test_traces_catch_blocks_that_two_requests_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: DraftModelDrafter) -> int:
        return 0

    monkeypatch.setattr(DraftModelDrafter, "_take", take)
    with pytest.raises(AssertionError, match="draft"):
        run_traces()


def run_traces() -> None:
    for seed in range(NUM_TRACES):
        model_trace(seed).run()
