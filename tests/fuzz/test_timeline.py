from __future__ import annotations

import pytest

from lora_serve.fuzz.answers import Called, CalledAtOnce
from lora_serve.fuzz.timeline import ABSENT, Timeline
from lora_serve.fuzz.trace import (
    AdapterCall,
    ConcurrentCalls,
    Event,
    Kill,
    Load,
    Reset,
    Trace,
    Unload,
)

Step = tuple[Event, float, float, int]
UNLOAD, RESET, RESET_ALL = Unload(lora_name="red"), Reset(lora_name="red"), Reset()


def timeline(*steps: Step) -> Timeline:
    trace = Trace(seed=0, events=tuple(step[0] for step in steps))
    return Timeline(trace, [Called(begin, end, status) for _, begin, end, status in steps])


def load(version: int, begin: float, end: float, status: int = 200, place: str = "one") -> Step:
    return Load(lora_name="red", version=version, place=place), begin, end, status


def test_a_name_stands_for_the_old_or_the_new_version_while_a_load_lasts() -> None:
    line = timeline(load(0, 10, 20), load(1, 30, 40))
    assert line.versions("red", 1, 2) == {ABSENT}
    assert line.versions("red", 12, 13) == {ABSENT, 0}
    assert line.versions("red", 25, 26) == {0}
    assert line.versions("red", 25, 31) == {0, 1}
    assert line.versions("red", 41, 99) == {1}
    assert line.versions("blue", 0, 99) == {ABSENT}


def test_a_load_that_failed_may_have_taken_effect_and_may_not() -> None:
    line = timeline(load(0, 10, 20), load(1, 30, 40, 503))
    assert line.versions("red", 50, 60) == {0, 1}


def test_an_unloaded_name_is_absent() -> None:
    line = timeline(load(0, 10, 20), (Unload(lora_name="red"), 30, 40, 200))
    assert line.versions("red", 35, 36) == {0, ABSENT}
    assert line.versions("red", 50, 60) == {ABSENT}


def test_files_have_changed_only_if_they_were_written_again() -> None:
    same, other = load(1, 30, 40), load(1, 30, 40, place="other")
    assert timeline(load(0, 10, 20), same).may_have_changed("red", 32, 33)
    assert not timeline(load(0, 10, 20), same).may_have_changed("red", 25, 26)
    assert not timeline(load(0, 10, 20), same).may_have_changed("red", 50, 60)
    assert not timeline(load(0, 10, 20), other).may_have_changed("red", 32, 33)


def test_kills_count_until_there_is_another_engine() -> None:
    line = timeline((Kill(), 10, 20, 200))
    assert [line.num_kills(*span) for span in ((1, 2), (1, 11), (19, 30), (21, 30))] == [0, 1, 1, 0]


def test_a_reset_divides_those_before_it_from_those_after_it() -> None:
    line = timeline(load(0, 1, 2), (Reset(lora_name="red"), 10, 20, 200))
    assert line.impossible == []
    assert line.was_reset_between("red", 5, 25)
    assert not line.was_reset_between("red", 15, 25)
    assert not line.was_reset_between("red", 5, 15)
    assert not line.was_reset_between("blue", 5, 25)


@pytest.mark.parametrize(
    ("is_loaded", "status", "is_possible"),
    [(True, 200, True), (True, 404, False), (False, 404, True), (False, 200, False)],
)
def test_a_reset_by_name_is_done_where_the_name_is_there_and_refused_where_not(
    is_loaded: bool, status: int, is_possible: bool
) -> None:
    before = [load(0, 1, 2)] if is_loaded else []
    line = timeline(*before, (RESET, 10, 20, status), (RESET_ALL, 30, 40, 200))
    assert (line.impossible == []) is is_possible
    assert line.versions("red", 50, 60) == ({0} if is_loaded else {ABSENT})


# ── concurrent calls ────────────────────────────────────────────────────────────────────────

LOAD_1, LOAD_2 = (Load(lora_name="red", version=version) for version in (1, 2))
NEW_1, NEW_2 = (Load(lora_name="red", version=version, in_place=False) for version in (1, 2))


def at_once(*calls: tuple[AdapterCall, int]) -> Timeline:
    """Version 0 was loaded, and ended loading at 2; then come the calls, from 10 to 20."""
    first = Load(lora_name="red", version=0)
    concurrent = ConcurrentCalls(calls=tuple(call for call, _ in calls))
    outcomes = tuple(Called(10, 20, status) for _, status in calls)
    trace = Trace(seed=0, events=(first, concurrent))
    return Timeline(trace, [Called(1, 2), CalledAtOnce(outcomes)])


@pytest.mark.parametrize(
    ("calls", "meanwhile", "afterwards"),
    [
        ([(LOAD_1, 200), (LOAD_2, 200)], {0, 1, 2}, {1, 2}),
        ([(LOAD_1, 200), (UNLOAD, 200)], {0, 1, ABSENT}, {1, ABSENT}),
        ([(NEW_1, 200), (UNLOAD, 200)], {0, 1, ABSENT}, {1}),
        ([(NEW_1, 400), (UNLOAD, 200)], {0, ABSENT}, {ABSENT}),
        ([(NEW_1, 200), (NEW_2, 400), (UNLOAD, 200)], {0, 1, ABSENT}, {1}),
        ([(UNLOAD, 200), (UNLOAD, 404)], {0, ABSENT}, {ABSENT}),
        ([(UNLOAD, 200), (RESET, 404)], {0, ABSENT}, {ABSENT}),
        ([(LOAD_1, 503), (UNLOAD, 200)], {0, 1, ABSENT}, {0, 1, ABSENT}),
    ],
)
def test_concurrent_calls_may_have_come_in_every_order_that_gives_their_outcomes(
    calls: list[tuple[AdapterCall, int]], meanwhile: set[int], afterwards: set[int]
) -> None:
    line = at_once(*calls)
    assert line.impossible == []
    assert line.versions("red", 5, 6) == {0}
    assert line.versions("red", 12, 13) == meanwhile
    assert line.versions("red", 30, 31) == afterwards


@pytest.mark.parametrize(
    "calls",
    [
        [(UNLOAD, 200), (UNLOAD, 200)],
        [(LOAD_1, 200), (UNLOAD, 404)],
        [(NEW_1, 200), (RESET, 200)],
        [(NEW_1, 200), (NEW_2, 200), (UNLOAD, 200)],
    ],
)
def test_outcomes_that_no_order_of_concurrent_calls_gives_are_told(
    calls: list[tuple[AdapterCall, int]],
) -> None:
    assert at_once(*calls).impossible == [1]


def test_a_reset_among_concurrent_calls_divides_as_one_alone() -> None:
    line = at_once((RESET, 200), (LOAD_1, 200))
    assert line.was_reset_between("red", 5, 25)
    assert not line.was_reset_between("red", 5, 15)
