"""Tells where a JSON value ends, while its text comes in pieces. Builds no value.

Strict JSON, as json.loads takes it but for NaN and Infinity. A run of characters inside a string
costs one match, so long strings are cheap.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MappingProxyType

_SPACES = re.compile(r"[ \t\n\r]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_RUN = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = MappingProxyType({"t": "true", "f": "false", "n": "null"})
_CLOSING = MappingProxyType({"{": "}", "[": "]"})
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """One value. is_complete: it has ended. is_broken: what comes is no JSON."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self._open: list[str] = []  # brackets around the next character
        self._step: Callable[[str, int], int] = self._value
        self._number: list[str] = []
        self._expected = ""  # the rest of true, false or null
        self._num_hex_digits = 0  # that the escape still needs
        self._is_key = False

    def feed(self, text: str, start: int) -> int:
        """Read text from `start`; returns where the value ends or breaks, or the text's end.

        A number that is the whole value ends only with what follows it.
        """
        position = start
        while position < len(text) and not (self.is_complete or self.is_broken):
            position = self._step(text, position)
        return position

    def _value(self, text: str, position: int) -> int:
        position = _skip_spaces(text, position)
        if position == len(text):
            return position
        char = text[position]
        if char in _CLOSING:
            self._open.append(char)
            self._step = self._first_key if char == "{" else self._first_item
        elif char == '"':
            self._step, self._is_key = self._string, False
        elif char in _WORDS:
            self._step, self._expected = self._word, _WORDS[char][1:]
        elif char in "-0123456789":
            self._step, self._number = self._digits, []
            return position
        else:
            self.is_broken = True
            return position
        return position + 1

    def _first_key(self, text: str, position: int) -> int:
        return self._key_or(text, position, "}")

    def _next_key(self, text: str, position: int) -> int:
        return self._key_or(text, position, "")

    def _key_or(self, text: str, position: int, closing: str) -> int:
        position = _skip_spaces(text, position)
        if position == len(text):
            return position
        if text[position] == closing:
            return self._close(position)
        if text[position] != '"':
            self.is_broken = True
            return position
        self._step, self._is_key = self._string, True
        return position + 1

    def _first_item(self, text: str, position: int) -> int:
        position = _skip_spaces(text, position)
        if position < len(text) and text[position] == "]":
            return self._close(position)
        self._step = self._value if position < len(text) else self._first_item
        return position

    def _string(self, text: str, position: int) -> int:
        position = _end_of(_STRING_RUN, text, position)
        if position == len(text):
            return position
        if text[position] == "\\":
            self._step = self._escape
        elif text[position] != '"':
            self.is_broken = True
            return position
        elif self._is_key:
            self._step = self._colon
        else:
            self._end_value()
        return position + 1

    def _escape(self, text: str, position: int) -> int:
        if text[position] == "u":
            self._step, self._num_hex_digits = self._hex_digit, 4
        elif text[position] in '"\\/bfnrt':
            self._step = self._string
        else:
            self.is_broken = True
            return position
        return position + 1

    def _hex_digit(self, text: str, position: int) -> int:
        if text[position] not in _HEX:
            self.is_broken = True
            return position
        self._num_hex_digits -= 1
        if self._num_hex_digits == 0:
            self._step = self._string
        return position + 1

    def _colon(self, text: str, position: int) -> int:
        position = _skip_spaces(text, position)
        if position == len(text):
            return position
        if text[position] != ":":
            self.is_broken = True
            return position
        self._step = self._value
        return position + 1

    def _word(self, text: str, position: int) -> int:
        if text[position] != self._expected[0]:
            self.is_broken = True
            return position
        self._expected = self._expected[1:]
        if not self._expected:
            self._end_value()
        return position + 1

    def _digits(self, text: str, position: int) -> int:
        end = _end_of(_NUMBER_RUN, text, position)
        self._number.append(text[position:end])
        if end < len(text):
            if _NUMBER.fullmatch("".join(self._number)):
                self._end_value()
            else:
                self.is_broken = True
        return end

    def _after(self, text: str, position: int) -> int:
        """What follows a value inside of an object or list."""
        position = _skip_spaces(text, position)
        if position == len(text):
            return position
        if text[position] == _CLOSING[self._open[-1]]:
            return self._close(position)
        if text[position] != ",":
            self.is_broken = True
            return position
        self._step = self._next_key if self._open[-1] == "{" else self._value
        return position + 1

    def _close(self, position: int) -> int:
        self._open.pop()
        self._end_value()
        return position + 1

    def _end_value(self) -> None:
        self.is_complete = not self._open
        self._step = self._after


def _skip_spaces(text: str, position: int) -> int:
    return _end_of(_SPACES, text, position)


def _end_of(run: re.Pattern[str], text: str, position: int) -> int:
    found = run.match(text, position)
    assert found is not None, "a run may be empty"
    return found.end()
