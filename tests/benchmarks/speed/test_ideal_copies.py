from __future__ import annotations

import pytest

from benchmarks.speed.ideal_copies import fewest_steps

PROMPT = (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("answer", "others", "most", "num_steps"),
    [
        ((9,), (), 8, 0),
        ((1, 2, 3, 4, 5, 6), (), 8, 1),  # four copies, and the token that no text has
        ((1, 2, 3, 4, 5, 6), (), 2, 2),
        ((9, 8, 7, 6), (), 8, 3),
        ((9, 8, 9, 8, 9, 8), (), 8, 3),  # what stands before is copied, not what comes
        ((9, 8, 7, 6), ((0, 9, 8, 7),), 8, 3),  # of a neighbour as many tokens are known
        ((9, 0, 8, 7, 6), ((8, 7, 6, 5, 5),), 8, 2),
    ],
)
def test_an_ideal_copy_takes_the_longest_that_was_known(
    answer: tuple[int, ...], others: tuple[tuple[int, ...], ...], most: int, num_steps: int
) -> None:
    assert fewest_steps(PROMPT, answer, others, most) == num_steps
