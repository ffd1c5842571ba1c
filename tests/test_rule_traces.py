"""The random lives of tests/test_traces.py, where some requests say which tokens may be drawn, and
the bugs that the traces would catch. Each mutant puts one back.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lora_serve.engine.core import grammars
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.scheduler.bad_words import BadWords
from lora_serve.scheduler.request import Request

NUM_TRACES = 15


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "overlapped"])
def test_every_answer_that_is_held_to_rules_is_the_lone_answer(async_scheduling: bool) -> None:
    num_banned = num_errors = 0
    for seed in range(NUM_TRACES):
        trace = OracleTrace(seed, async_scheduling=async_scheduling)
        assert trace.run().wrong == [], f"seed {seed}"
        steps = trace.engine.executor.steps
        samples = [s for step in steps for chunk in step.requests for s in chunk.asked.samples]
        num_banned += sum(bool(sample.banned_token_ids) for sample in samples)
        errors = [outputs[-1].error for outputs in trace.engine.outputs.values()]
        num_errors += sum(
            error is not None and "leaves no token" in error.message for error in errors
        )
    assert num_banned > 20 * NUM_TRACES
    assert num_errors > 0


def is_caught(*, async_scheduling: bool = False, num_traces: int = 40) -> bool:
    for seed in range(num_traces):
        try:
            if OracleTrace(seed, async_scheduling=async_scheduling).run().wrong:
                return True
        except AssertionError:
            return True
    return False


def test_traces_catch_a_grammar_that_allows_what_the_client_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "common_bitmask", lambda bitmask, allowed: bitmask)
    assert is_caught()


def test_traces_catch_a_step_that_is_planned_before_bad_words_know_the_token_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BadWords, "has_sequences", False)
    assert is_caught(async_scheduling=True)


def test_traces_catch_bad_words_that_only_look_at_the_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    banned_after = BadWords.banned_after

    def by_the_last(words: BadWords, token_ids: Sequence[int]) -> Sequence[int]:
        return banned_after(words, token_ids[-1:])

    monkeypatch.setattr(BadWords, "banned_after", by_the_last)
    assert is_caught()


def test_traces_catch_a_request_that_forgets_what_the_client_allows_once_it_is_preempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bitmask = Request.bitmask

    def until_preempted(request: Request) -> bytes | None:
        is_forgotten = request.num_preemptions and not request.has_grammar
        return None if is_forgotten else bitmask.__get__(request)

    monkeypatch.setattr(Request, "bitmask", property(until_preempted))
    assert is_caught()
