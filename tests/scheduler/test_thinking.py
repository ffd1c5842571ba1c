from __future__ import annotations

from lora_serve.scheduler.thinking import Thinking
from lora_serve.structured_outputs import ReasoningTokens

START, END = 20, 30
OPEN, CLOSED = (ReasoningTokens(START, END, is_open) for is_open in (True, False))


def after(markers: ReasoningTokens, budget: int, *token_ids: int) -> Thinking:
    thinking = Thinking(markers, budget)
    for token_id in token_ids:
        thinking.drew(token_id)
    return thinking


def test_reasoning_must_end_when_its_budget_is_spent() -> None:
    assert after(OPEN, 0).must_end
    assert not after(OPEN, 2, 5).must_end
    assert after(OPEN, 2, 5, START).must_end  # a marker within counts as any token does
    assert not after(OPEN, 2, 5, 6, END).must_end


def test_markers_do_not_count() -> None:
    assert not after(CLOSED, 0).must_end
    assert after(CLOSED, 0, START).must_end
    assert not after(CLOSED, 1, START).must_end
    assert after(CLOSED, 1, START, 5).must_end


def test_reasoning_that_ended_or_never_began_is_over() -> None:
    for thinking in (after(OPEN, 9, END), after(CLOSED, 9, 5), after(CLOSED, 0, START, END)):
        assert thinking.is_over
        assert not thinking.must_end
        thinking.drew(START)
        assert thinking.is_over


def test_the_mask_allows_the_end_alone() -> None:
    assert after(OPEN, 0).only_end == bytes([0, 0, 0, 1 << 6])


def test_a_step_hangs_on_tokens_that_may_spend_the_budget() -> None:
    assert not after(OPEN, 0).hangs_on(0)
    assert after(OPEN, 1).hangs_on(1)
    assert not after(OPEN, 2).hangs_on(1)
    assert after(OPEN, 2).hangs_on(2)
    assert after(CLOSED, 0).hangs_on(1)
    assert not after(CLOSED, 1).hangs_on(1)
    assert not after(OPEN, 0, END).hangs_on(1)
