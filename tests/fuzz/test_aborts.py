"""Which requests of a trace calls can have ended, and how many they may say that they ended."""

from __future__ import annotations

import pytest

from lora_serve.fuzz.aborts import Aborts
from lora_serve.fuzz.answers import Called, Choice, Heard
from lora_serve.fuzz.trace import Abort, Ask, Reset, Tokens, Trace
from lora_serve.sampling_params import SamplingParams

ASK = Ask(prompt=Tokens((1, 2)), params=SamplingParams())
TRACE = Trace(seed=0, events=(ASK, Reset(), ASK, Abort(newest=1), ASK, Abort()))


def heard(begin: float, end: float, *, ending: str = "stop", has_left: bool = False) -> Heard:
    choices = {0: Choice(finish_reason=ending)}
    return Heard(begin, end, 200, is_whole=not has_left, has_left=has_left, choices=choices)


def called(begin: float, end: float, told: int = 0, status: int = 200) -> Called:
    return Called(begin, end, status, f'{{"aborted": {told}}}' if status == 200 else "none")


def aborts(*asked: Heard, first: Called, second: Called) -> Aborts:
    one, two, three = asked
    return Aborts(TRACE, [one, called(0, 0), two, first, three, second])


def test_calls_name_the_newest_requests_before_them_or_all() -> None:
    assert TRACE.aborted_by(3) == [2]
    assert TRACE.aborted_by(5) == [0, 2, 4]
    few = Trace(seed=0, events=(ASK, Abort(newest=8)))
    assert few.aborted_by(1) == [0]


def test_a_call_can_have_ended_what_it_names_and_what_ran_meanwhile() -> None:
    judged = aborts(
        *(heard(0, 9), heard(0, 4, has_left=True), heard(6, 9)),
        first=called(5, 5.5),
        second=called(20, 21),
    )
    assert [judged.may_have_ended(index) for index in (0, 2, 4)] == [False, True, False]
    judged = aborts(
        *(heard(0, 9), heard(0, 4), heard(6, 9)), first=called(5, 5.5), second=called(8, 8.5)
    )
    assert [judged.may_have_ended(index) for index in (0, 2, 4)] == [True, False, True]


@pytest.mark.parametrize(
    ("told", "status", "is_right"),
    [(0, 200, False), (1, 200, True), (2, 200, True), (3, 200, False), (0, 503, True)],
)
def test_the_number_that_a_call_tells_is_of_those_that_ran(
    told: int, status: int, is_right: bool
) -> None:
    """One was ended by it alone, one may have ended by itself, one was over."""
    judged = aborts(
        *(heard(0, 9, ending="abort"), heard(0, 9), heard(0, 1)),
        first=called(30, 31),
        second=called(5, 6, told, status),
    )
    wrong = [(5, f"{told} requests aborted, but it was 1 to 2 of them")]
    assert list(judged.wrong_numbers()) == ([] if is_right else wrong)


def test_what_two_calls_can_have_ended_counts_for_either() -> None:
    asked = heard(0, 1), heard(0, 9, ending="cancelled"), heard(8.5, 9)
    for told in ((0, 1), (1, 0)):
        judged = aborts(*asked, first=called(5, 6, told[0]), second=called(5, 6, told[1]))
        assert list(judged.wrong_numbers()) == []
