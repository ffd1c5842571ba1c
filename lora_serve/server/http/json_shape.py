"""Counts what a JSON text is made of before it is parsed, and refuses what no request needs.

The parser makes an object of each value, and lets no other thread run meanwhile: 4 MiB of `[],` are
1.4 million lists and over a second in which no client is answered (pydantic-core 2.46, Zen 5). To
count costs a few passes over the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lora_serve.errors import InvalidRequestError

MAX_STRINGS = 2**16  # keys of objects are strings too
MAX_CONTAINERS = 2**15
MAX_ITEMS = 2**20  # token ids of prompts, above all
FEW_CONTAINERS = 1024
PIECE_BYTES = 2**20  # other threads run between two of them
TALLY = "json_tally"  # in the context of a validation, for texts that hold JSON themselves

_BACKSLASHES = re.compile(rb"\\*")


def has_few_containers(data: bytes) -> bool:
    """Whether so few lists and objects can be in it that it is parsed at once."""
    return data.count(b"[") + data.count(b"{") <= FEW_CONTAINERS


def check_shape(data: bytes) -> None:
    """Refuse a body of more values than it takes long to parse.

    Raises:
        InvalidRequestError: naming what there is too much of.
    """
    found = JsonTally().add(data)
    if found is not None:
        raise InvalidRequestError(f"the body holds {found}; send several requests")


class JsonTally:
    """What all JSON texts together hold that were added."""

    def __init__(self) -> None:
        self._num_strings = self._num_containers = self._num_values = 0

    def add(self, data: bytes) -> str | None:
        """What there is too much of now, and how much is allowed; None if nothing.

        Of what is not JSON at least all that precedes the fault is counted, as the parser goes.
        """
        num_quotes = 0
        for piece in _pieces(data):
            plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            in_string = num_quotes % 2
            num_quotes += plain.count(b'"')
            found = self._too_much_with(num_quotes // 2)
            if found is None:
                outside = b"".join(plain.split(b'"')[in_string::2])
                self._num_containers += outside.count(b"[") + outside.count(b"{")
                self._num_values += outside.count(b",")
                found = self._too_much_with(num_quotes // 2)
            if found is not None:
                return found
        self._num_strings += num_quotes // 2
        return None

    def _too_much_with(self, num_strings: int) -> str | None:
        for number, limit, what in (
            (self._num_strings + num_strings, MAX_STRINGS, "strings"),
            (self._num_containers, MAX_CONTAINERS, "lists and objects"),
            (self._num_values, MAX_ITEMS, "values"),
        ):
            if number > limit:
                return f"{number} {what}, at most {limit} are allowed"
        return None


def _pieces(data: bytes) -> Iterator[bytes]:
    """The bytes in pieces, none of which ends within an escape."""
    begin = 0
    while begin < len(data):
        end = begin + PIECE_BYTES
        if data[end - 1 : end] == b"\\":
            backslashes = _BACKSLASHES.match(data, end)
            assert backslashes is not None, "it matches none, too"
            end = backslashes.end() + 1
        yield data[begin:end]
        begin = end
