from __future__ import annotations

import pytest

from benchmarks.soak.fleet.history import ABSENT, Answer, Change, History


def told(version: str, begin: float, end: float, serial: int, *, everywhere: bool = True) -> Change:
    return Change("n", version, begin, end, serial, everywhere)


def untold(version: str, begin: float, end: float) -> Change:
    return Change("n", version, begin, end)


def answer(version: str, begin: float, end: float, process: str = "") -> Answer:
    return Answer("n", version, begin, end, process)


def is_right(history: History, *args: object) -> bool:
    return history.fault_of(answer(*args)) is None  # type: ignore[arg-type]


def test_a_version_may_answer_from_its_begin_until_another_is_everywhere() -> None:
    history = History([told("a", 1, 2, 1), told("b", 5, 8, 2), told("a", 20, 21, 9)])
    assert is_right(history, ABSENT, 0, 0.5)
    assert is_right(history, ABSENT, 1.5, 3)
    assert not is_right(history, ABSENT, 3, 4)
    assert not is_right(history, "b", 3, 4)
    assert is_right(history, "a", 7, 9)  # it was sent before b was told to be everywhere
    assert is_right(history, "b", 6, 7)
    assert not is_right(history, "a", 9, 10)
    assert is_right(history, "a", 9, 20.5)  # it is on its way back
    assert not is_right(history, "never", 9, 10)
    assert is_right(history, ABSENT, 9, 10) is False
    assert History([]).fault_of(answer("a", 0, 1))


def test_an_incomplete_change_ends_nothing() -> None:
    history = History([told("a", 1, 2, 1), told("b", 5, 8, 2, everywhere=False)])
    assert is_right(history, "a", 100, 101)
    assert is_right(history, "b", 100, 101)


def test_a_name_that_was_unloaded_everywhere_is_gone() -> None:
    history = History([told("a", 1, 2, 1), told(ABSENT, 5, 6, 2)])
    assert is_right(history, ABSENT, 5, 5.5)
    assert is_right(history, ABSENT, 7, 8)
    assert not is_right(history, "a", 7, 8)


def test_a_change_of_unknown_outcome_may_answer_until_one_that_was_begun_later_is_everywhere() -> (
    None
):
    history = History([told("a", 1, 2, 1), untold("u", 3, 4), told("b", 5, 6, 2)])
    assert not is_right(history, "u", 2, 2.5)
    assert is_right(history, "u", 5.5, 7)
    assert not is_right(history, "u", 7, 8)
    at_once = History([told("b", 3, 6, 2), untold("u", 5, 9)])
    assert is_right(at_once, "u", 100, 101)  # nobody can say which of the two was first
    assert is_right(at_once, "b", 100, 101)


def test_of_two_at_once_the_one_with_the_higher_serial_stays() -> None:
    history = History([told("x", 1, 4, 7), told("y", 1, 3, 6)])
    assert is_right(history, "y", 3.5, 5)
    assert is_right(history, "x", 5, 6)
    assert not is_right(history, "y", 5, 6)
    assert history.num_races == 1


def test_serials_follow_calls_that_follow_each_other() -> None:
    assert not [*History([told("x", 1, 2, 7), told("y", 3, 4, 8)]).disorders()]
    assert len([*History([told("x", 1, 2, 7), told("y", 3, 4, 6)]).disorders()]) == 1


@pytest.mark.parametrize(("process", "num_faults"), [("p", 1), ("", 0)])
def test_a_process_goes_back_to_no_earlier_version(process: str, num_faults: int) -> None:
    history = History([told("a", 1, 2, 1), told("b", 5, 9, 2, everywhere=False)])
    answers = [answer("b", 6, 7, process), answer("a", 6.5, 8, process)]
    assert not [*history.returns(answers)], "they ran at the same time"
    answers.append(answer("a", 10, 11, process))
    assert len([*history.returns(answers)]) == num_faults
    assert not [*history.returns([*answers[:2], answer("a", 10, 11, "q")])]


def test_names_are_told_apart() -> None:
    history = History([told("a", 1, 2, 1)])
    assert history.fault_of(Answer("m", "a", 3, 4))
    assert history.fault_of(Answer("m", ABSENT, 3, 4)) is None
