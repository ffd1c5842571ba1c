"""What counts as goodput: tokens when they come, held against the loops beside them."""

import pytest

from benchmarks.speed.overload import Answer, Goodput, goodput


def wave(begin: float, num_answers: int = 16, tokens: int = 10) -> list[Answer]:
    """Equal answers that take one second together."""
    arrivals = tuple(begin + (index + 1) / tokens for index in range(tokens))
    return [Answer(arrivals, tokens)] * num_answers


@pytest.mark.parametrize("first_end", [0.99, 1.0, 1.01])
def test_waves_count_by_their_tokens_wherever_one_ends(first_end: float) -> None:
    answers = [answer for begin in range(8) for answer in wave(first_end - 1 + begin)]
    assert goodput(answers, until=4.4) == pytest.approx(160, rel=0.04)


def test_tokens_that_come_outside_do_not_count() -> None:
    assert goodput([Answer((0.5, 1.5, 5.0), 3)], until=4.0) == pytest.approx(1 / 3)


def test_an_open_loop_is_held_against_the_closed_ones_around_it() -> None:
    found = Goodput(
        closed=(100.0, 300.0, 100.0), above=(190.0, 210.0), num_requests=4, num_refused=2
    )
    assert found.shares() == [0.95, 1.05]
