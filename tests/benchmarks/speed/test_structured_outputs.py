"""The cost of grammars is that of the turns, in which either comes first by turns."""

from typing import Any

import pytest

from benchmarks.speed import structured_outputs
from benchmarks.speed.structured_outputs import grammar, measure, table_line


def measured(monkeypatch: pytest.MonkeyPatch, patience_seconds: float) -> tuple[Any, list[bool]]:
    order: list[bool] = []

    def step_seconds(llm: object, num_requests: int, temperature: float, *, held: bool) -> float:
        order.append(held)
        return (0.010 + 0.001 * ((len(order) - 1) // 2)) * (1.02 if held else 1.0)

    monkeypatch.setattr(structured_outputs, "step_seconds", step_seconds)
    llm: Any = None
    return measure(llm, 8, 0.0, 4, patience_seconds), order[2:]


def test_a_machine_that_gets_slower_changes_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    cost, order = measured(monkeypatch, 60.0)
    assert order == [False, True, True, False, False, True, True, False]
    assert (cost.num_turns, cost.drawn) == (4, "greedy")
    assert cost.cost == pytest.approx(0.02)
    assert "+2.0%" in table_line(cost)


def test_without_time_there_is_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    cost, order = measured(monkeypatch, 0.0)
    assert (cost.num_turns, order) == (1, [False, True])


def test_no_two_requests_have_one_grammar() -> None:
    assert len({grammar(number).text for number in range(8)}) == 8
