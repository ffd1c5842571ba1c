from __future__ import annotations

from collections.abc import Sequence

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


class PlainStopStrings:
    """The definition: the whole text so far is looked at again with each piece."""

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self.stop, self.include = stop, include_in_output
        self.text, self.shown, self.matched = "", 0, None

    def push(self, text: str, is_checked: bool) -> str:
        num_old, self.text = len(self.text), self.text + text
        begins = {
            begin: stop
            for stop in reversed(self.stop)  # of equal ones the first listed stays
            for begin in range(self.shown, len(self.text))
            if self.text.startswith(stop, begin) and begin + len(stop) > num_old
        }
        if begins and is_checked:
            self.matched = begins[min(begins)]
            return self._show(min(begins) + self.include * len(self.matched))
        held = range(max(map(len, self.stop), default=1) - 1, 0, -1)
        ends = (len(self.text) - count for count in held if len(self.text) - count >= self.shown)
        return self._show(
            next((end for end in ends if self._may_begin(self.text[end:])), len(self.text))
        )

    def _may_begin(self, tail: str) -> bool:
        return any(stop.startswith(tail) and len(stop) > len(tail) for stop in self.stop)

    def _show(self, end: int) -> str:
        start, self.shown = self.shown, end
        return self.text[start:end]


@given(
    pieces=st.lists(st.tuples(st.text("ab", max_size=6), st.booleans()), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=7), max_size=4),
    include=st.booleans(),
)
def test_each_piece_shows_what_the_plain_definition_shows(
    pieces: list[tuple[str, bool]], stop: list[str], include: bool
) -> None:
    stops, plain = StopStrings(stop, include), PlainStopStrings(stop, include)
    for text, is_checked in pieces:
        assert stops.push(text, is_checked=is_checked) == plain.push(text, is_checked)
        assert stops.matched == plain.matched
        if plain.matched is not None:
            break
    else:
        assert stops.flush() == plain.text[plain.shown :]


class CountedText(str):
    """A stop string that counts how many of its characters are looked at."""

    num_looks = 0

    def __getitem__(self, index: object) -> str:
        self.num_looks += 1
        return super().__getitem__(index)  # type: ignore[index]

    def startswith(self, prefix: str, *span: int) -> bool:  # type: ignore[override]
        self.num_looks += len(prefix)
        return super().startswith(prefix, *span)


@pytest.mark.parametrize("letter", ["a", "ab"])
@pytest.mark.parametrize("stop", ["a" * 3000 + "c", "ab" * 1500 + "c", "c" + "a" * 3000])
def test_a_letter_of_the_answer_costs_a_few_looks_however_long_a_stop_string_is(
    letter: str, stop: str
) -> None:
    stops = [CountedText(stop) for _ in range(4)]
    cut, answer = StopStrings(stops, False), letter * 5000
    shown = "".join(cut.push(character) for character in answer)
    assert shown + cut.flush() == answer
    for counted in stops:
        assert counted.num_looks <= 6 * len(answer)
