"""A rendered chat is parted at its marks, each of which stands once, in their order."""

from __future__ import annotations

import time

import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.server.openai.mixed_chats import drawn_marks, pieces_between


def test_pieces_are_what_stands_before_between_and_behind_the_marks() -> None:
    marks = drawn_marks(12)
    pieces = ["", "0end", *map(str, range(10)), "embeds"]
    text = "".join(piece + mark for piece, mark in zip(pieces, [*marks, ""], strict=True))
    assert pieces_between(text, marks) == pieces
    assert pieces_between("a text", []) == ["a text"]


@pytest.mark.parametrize("order", [[], [0], [1], [1, 0], [0, 0], [0, 1, 1], [0, 1, 0], [0, 1, 2]])
def test_marks_left_out_repeated_or_moved_are_refused(order: list[int]) -> None:
    marks = drawn_marks(3)
    text = "-".join(marks[index] for index in order)
    with pytest.raises(InvalidRequestError, match="leaves out, repeats or moves"):
        pieces_between(text, marks[:2])


def test_many_marks_are_found_in_one_walk_of_the_text() -> None:
    """A walk for each mark takes about a second."""
    marks = drawn_marks(10_000)
    begin = time.thread_time()
    assert len(pieces_between("x".join(marks), marks)) == 10_001
    assert time.thread_time() - begin < 0.3
