"""Bounds the memory of a chat template: ten characters write gigabytes, and three in a loop do.

What a template makes is counted against the room of its rendering: each text, list and number that
an operator, a filter, a call or a block makes, whether it is kept or not. What could become much
more than it is made of (`*`, `center`, `replace`, a list of lists as a text, …) is estimated before
it is made (`template_growth.py`). What a template writes stays the same.
"""

from __future__ import annotations

import sys
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar

from jinja2.utils import Namespace

from lora_serve.errors import InvalidRequestError

# Of one rendering. An honest template makes some copies of each message, a dozen at most; those
# that add each one to the text so far make half as many copies as there are messages.
MAX_BYTES = 2**30
CHAR_BYTES = 4  # the most that one takes in a text
ITEM_BYTES = 64  # of a list, with a small object in it
_ESCAPED_CHARS = 12  # that are written for one, at most
_NUMBER_CHARS = 32  # of a float, a name, and so on
_FLAT, _SIZED = (str, bytes, int), (list, tuple, dict, set)


class TemplateMemoryError(InvalidRequestError):
    """The template takes too much memory with these messages."""


class _Room:
    """What is left of the bytes that a rendering may make."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = self.left = num_bytes


_room: ContextVar[_Room | None] = ContextVar("_room", default=None)


@contextmanager
def within_memory(num_bytes: int) -> Iterator[None]:
    """Let the template that is compiled or rendered here, in this thread, make so many bytes."""
    token = _room.set(_Room(num_bytes))
    try:
        yield
    finally:
        _room.reset(token)


def need(num_bytes: int) -> None:
    """Refuse what would take more than is left."""
    _checked(num_bytes)


def charge(num_bytes: int) -> None:
    _checked(num_bytes).left -= num_bytes


def _checked(num_bytes: int) -> _Room:
    room = _room.get()
    assert room is not None, "a template outside of within_memory"
    if num_bytes > room.left:
        raise TemplateMemoryError(
            f"the chat template makes more than {room.num_bytes >> 20} MiB of values of these "
            "messages; send fewer or shorter ones, or take a simpler template",
            "messages",
        )
    return room


def charge_value(value: object) -> None:
    """Count a value that was just made, without what is in it: that was counted."""
    if isinstance(value, _FLAT):
        charge(sys.getsizeof(value))
    elif isinstance(value, _SIZED):
        charge(ITEM_BYTES * (1 + len(value)))


def need_text(*values: object, times: int = 1) -> None:
    """Refuse to write values, so many times, that are too long as a text."""
    need(CHAR_BYTES * times * sum(map(written_chars, values)))


def written_chars(value: object) -> int:
    """The most characters that the value can have as a text; what it has twice counts twice."""
    return len(value) if isinstance(value, str) else _ESCAPED_CHARS * _chars(value, {})


def _chars(value: object, known: dict[int, int]) -> int:
    """known: those of containers, by id."""
    if isinstance(value, str | bytes):
        return len(value) + 4
    if isinstance(value, int):
        return _NUMBER_CHARS + value.bit_length() // 3
    parts = _parts(value)
    if parts is None:
        return _NUMBER_CHARS
    if id(value) not in known:
        known[id(value)] = 0  # of one that is a part of itself, which is written as dots
        known[id(value)] = 2 + sum(4 + _chars(part, known) for part in parts)
    return known[id(value)]


def _parts(value: object) -> Iterable[object] | None:
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")  # where its text comes from
    if isinstance(value, dict):
        value = value.items()
    if isinstance(value, ItemsView):
        return (part for item in value for part in item)
    return value if isinstance(value, list | tuple | set | KeysView | ValuesView) else None
