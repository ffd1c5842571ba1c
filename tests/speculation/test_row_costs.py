from __future__ import annotations

import pytest

from lora_serve.speculation.row_costs import RowCosts

FLAT = RowCosts([(1, 1.0), (16, 1.0)])
STEEP = RowCosts([(1, 1.0), (2, 2.0), (4, 4.0)])
STEPPED = RowCosts([(1, 1.0), (4, 1.0), (5, 3.0), (8, 3.0)])


@pytest.mark.parametrize(
    ("num_rows", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.0), (4, 3.0), (5, 4.0), (9, 8.0)]
)
def test_seconds_lie_between_those_that_were_measured_and_go_on_so(
    num_rows: int, seconds: float
) -> None:
    assert RowCosts([(1, 1.0), (3, 2.0), (4, 3.0)]).seconds(num_rows) == seconds


def test_a_step_that_something_made_slow_makes_no_others_dear() -> None:
    noisy = RowCosts([(1, 1.0), (2, 3.0), (4, 2.0)])
    assert [noisy.seconds(rows) for rows in (1, 2, 3, 4, 8)] == [1.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("costs", "gains", "num_worth"),
    [
        (FLAT, [0.9, 0.5, 0.01], 3),
        (STEEP, [0.99, 0.98], 0),
        (STEPPED, [0.9, 0.9, 0.9, 0.9], 3),
        (STEPPED, [0.9] * 7, 3),
        (FLAT, [], 0),
        (RowCosts([(1, 1.0), (2, 1.5)]), [0.4], 0),
        (RowCosts([(1, 1.0), (2, 1.5)]), [0.6], 1),
        # The second of two rows may pay for the first.
        (RowCosts([(1, 1.0), (2, 1.9), (3, 1.9)]), [0.8, 0.8], 2),
    ],
)
def test_rows_are_added_where_they_give_more_tokens_a_second(
    costs: RowCosts, gains: list[float], num_worth: int
) -> None:
    assert costs.num_worth(1, 1, gains) == num_worth


def test_what_a_prompt_computes_makes_a_row_cheap() -> None:
    assert STEEP.num_worth(1, 1, [0.5]) == 0
    assert STEEP.num_worth(100, 1, [0.5]) == 1
