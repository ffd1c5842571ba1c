from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.estimate import H200, TARGETS, decode_seconds, shares_left, table
from benchmarks.gpu.shapes import SHAPES

PAGE = Path(__file__).parents[3] / "docs" / "performance.md"


def test_the_page_tells_what_the_script_gives() -> None:
    page = PAGE.read_text()
    assert table(H200) in page
    assert shares_left(H200) in page


def test_a_lone_step_takes_what_reading_the_weights_does() -> None:
    """7.07 billion weights, and 29 million values of KV, of two bytes each."""
    assert decode_seconds(H200, SHAPES["7B"], 1, 0) == pytest.approx(2 * 7.1e9 / 4.8e12, rel=0.01)


def test_fewer_projections_leave_more_of_the_base_rate() -> None:
    taken = [decode_seconds(H200, SHAPES["7B"], 32, 32, targets) for targets in TARGETS.values()]
    assert taken == sorted(taken, reverse=True)
    assert decode_seconds(H200, SHAPES["7B"], 32, 0) < taken[-1]
