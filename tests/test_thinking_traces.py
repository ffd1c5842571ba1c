"""The random lives of tests/test_traces.py, where some answers reason no longer than they may, and
the bugs that the traces would catch. Each mutant puts one back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.scheduler import drafting
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.thinking import Thinking
from tests.test_drafted_traces import run_trace

NUM_TRACES = 15


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "overlapped"])
def test_every_answer_with_a_budget_is_the_lone_answer(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_forced = num_preempted = 0
    only_end = Thinking.only_end

    def counted(self: Thinking) -> bytes:
        nonlocal num_forced
        num_forced += 1
        return only_end.__get__(self)

    monkeypatch.setattr(Thinking, "only_end", property(counted))
    for seed in range(NUM_TRACES):
        trace = OracleTrace(seed, async_scheduling=async_scheduling)
        assert trace.run().wrong == [], f"seed {seed}"
        num_preempted += trace.result.num_preemptions
    assert num_forced > NUM_TRACES
    assert num_preempted > NUM_TRACES


def is_caught(run: Callable[[int], bool], num_traces: int = 40) -> bool:
    """Whether some trace gives a wrong answer, breaks an invariant, or ends the engine."""
    for seed in range(num_traces):
        try:
            if run(seed):
                return True
        except (ArithmeticError, AssertionError, LookupError, ValueError):
            return True
    return False


def is_wrong(seed: int) -> bool:
    return bool(OracleTrace(seed).run().wrong)


def is_wrong_overlapped(seed: int) -> bool:
    return bool(OracleTrace(seed, async_scheduling=True).run().wrong)


def is_wrong_drafted(seed: int) -> bool:
    return bool(run_trace(seed)[0].wrong)


def test_traces_catch_a_budget_that_is_never_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thinking, "must_end", False)
    assert is_caught(is_wrong)


def test_traces_catch_a_step_that_is_planned_before_it_is_known_what_was_thought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Thinking, "hangs_on", lambda self, num_pending: False)
    assert is_caught(is_wrong_overlapped)


def test_traces_catch_drafts_that_think_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_draft(request: Request) -> bool:
        return not request.has_grammar and request.prompt_embeds is None and request.max_tokens > 1

    monkeypatch.setattr(drafting, "_may_draft", may_draft)
    assert is_caught(is_wrong_drafted)


def test_traces_catch_an_end_that_bad_words_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    banned = Request.banned_token_ids

    def always(self: Request, position: int, drafts: tuple[int, ...] = ()) -> object:
        thinking, self.thinking = self.thinking, None
        try:
            return banned(self, position, drafts)
        finally:
            self.thinking = thinking

    monkeypatch.setattr(Request, "banned_token_ids", always)
    assert is_caught(is_wrong, 100)


def test_traces_catch_a_preempted_request_that_thinks_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_over = Request.start_over

    def thinking_anew(self: Request) -> None:
        start_over(self)
        if self.thinking is not None:
            assert self.params.reasoning is not None
            assert self.params.thinking_token_budget is not None
            self.thinking = Thinking(self.params.reasoning, self.params.thinking_token_budget)

    monkeypatch.setattr(Request, "start_over", thinking_anew)
    assert is_caught(is_wrong)
