"""The host's time is measured without a card: every part of a step is there, and all add up."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.gpu.host_time import COLUMNS, HEAD, measure, table_line
from tests.fakes.threads import one_thread

__all__ = ["one_thread"]


def test_the_parts_of_each_step_add_up_to_it() -> None:
    rows = list(measure(contexts=[40], requests=[1, 3], num_turns=1))
    assert [(row.num_requests, row.num_adapters, row.tokens) for row in rows] == [
        *((1, 1, "greedy"), (1, 0, "greedy"), (1, 0, "drawn"), (1, 0, "penalised")),
        *((3, 3, "greedy"), (3, 0, "greedy"), (3, 0, "drawn"), (3, 0, "penalised")),
    ]
    for row in rows:
        assert set(row.parts) == set(COLUMNS)
        assert all(time > 0 for time in row.parts.values())
        assert sum(row.parts.values()) == pytest.approx(row.step)
        assert table_line(row).count("|") == HEAD.count("|")
