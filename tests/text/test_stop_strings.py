from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.text.stop_strings import StopStrings


def test_without_stop_strings_all_text_comes_at_once() -> None:
    stops = StopStrings((), False)
    assert stops.push("hello") == "hello"
    assert stops.flush() == ""


def test_text_that_may_begin_a_stop_string_waits_and_comes_when_it_does_not() -> None:
    stops = StopStrings(("</s>",), False)
    assert stops.push("a</") == "a"
    assert stops.push("s") == ""
    assert stops.push("pan></") == "</span>"
    assert stops.flush() == "</"
    assert stops.matched is None


def test_the_text_ends_before_the_stop_string_and_nothing_follows() -> None:
    stops = StopStrings(("END",), False)
    assert stops.push("one E") == "one "
    assert stops.push("ND two") == ""
    assert stops.matched == "END"
    assert stops.push("three") == ""
    assert stops.flush() == ""


def test_the_stop_string_itself_is_shown_if_asked_for() -> None:
    stops = StopStrings(("END",), True)
    assert stops.push("one END two") == "one END"


def test_the_stop_string_that_begins_first_counts_whatever_their_order() -> None:
    for stop in (("b", "a"), ("a", "b")):
        stops = StopStrings(stop, False)
        assert stops.push("xxaxb") == "xx"
        assert stops.matched == "a"


def test_of_two_that_begin_together_the_first_listed_counts() -> None:
    stops = StopStrings(("ab", "a"), False)
    assert stops.push("xab") == "x"
    assert stops.matched == "ab"


def test_a_repeated_beginning_is_not_lost() -> None:
    stops = StopStrings(("aab",), False)
    shown = "".join(stops.push(letter) for letter in "aaaab")
    assert (shown, stops.matched) == ("aa", "aab")


def test_a_stop_string_within_unchecked_text_is_text() -> None:
    stops = StopStrings(("ab",), False)
    assert stops.push("xab", is_checked=False) == "xab"
    assert stops.push("y") == "y"
    assert stops.matched is None


def test_a_stop_string_that_ends_in_checked_text_counts() -> None:
    stops = StopStrings(("ab",), False)
    assert stops.push("xa", is_checked=False) == "x"
    assert stops.push("b") == ""
    assert stops.matched == "ab"


def test_an_unchecked_one_inside_what_is_held_stays_text() -> None:
    stops = StopStrings(("abc", "b"), False)
    assert stops.push("ab", is_checked=False) == ""
    assert stops.push("x") == "abx"
    assert stops.matched is None


@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_letter_by_letter_the_text_is_cut_at_the_first_stop_string_to_end(
    text: str, stop: list[str], include: bool
) -> None:
    stops = StopStrings(stop, include)
    shown = "".join(stops.push(letter) for letter in text) + stops.flush()
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert (shown, stops.matched) == (text, None)
        return
    end = min(ends)
    matched = max((s for s in stop if text[:end].endswith(s)), key=len)
    assert stops.matched == matched
    assert shown == (text[:end] if include else text[: end - len(matched)])


@pytest.mark.parametrize("cut", range(1, 12))
def test_what_has_been_shown_is_never_taken_back(cut: int) -> None:
    text, stops = "say STOPS and STOP now", StopStrings(("STOP now",), False)
    first = stops.push(text[:cut])
    assert text.startswith(first)
    assert first + stops.push(text[cut:]) == "say STOPS and "
