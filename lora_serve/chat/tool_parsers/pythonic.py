"""Calls written as a Python list of function calls: [f(x=1, names=["a"]), g()].

Arguments are told as the JSON that says the same, value by value, strings piece by piece.
"""

from __future__ import annotations

import json
import re
from types import MappingProxyType

from lora_serve.chat.tool_parsers.reader import CallReader, Malformed, Steps

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 32  # of lists and dictionaries in one argument, since reading them recurses
_KEYWORD_RUN = re.compile(r"\w*")
_WORD_RUN = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_INSIDE = MappingProxyType({quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"})
_WORDS = MappingProxyType(
    {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false"}
    | {"null": "null"}
)
_ESCAPED = MappingProxyType(
    {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", '"': '"', "'": "'"}
    | {"\n": ""}
)
_NUM_HEX_DIGITS = MappingProxyType({"x": 2, "u": 4, "U": 8})


class PythonicCalls(CallReader):
    def read(self) -> Steps:
        yield from self.spaces()
        yield from self.expect("[")
        while True:
            yield from self.spaces()
            yield from self._call()
            if (yield from self.spaces()) == "]":
                break
            yield from self.expect(",")
        yield from self.expect("]")
        self.end_call()
        yield from self.accept(PYTHON_END)

    def _call(self) -> Steps:
        self.begin_reading()
        name = yield from self.run(self.name_run)
        yield from self.expect("(")
        self.tell_call(name)
        self.tell_arguments("{")
        separator = ""
        while (yield from self.spaces()) != ")":
            keyword = yield from self.run(_KEYWORD_RUN)
            yield from self.spaces()
            yield from self.expect("=")
            self.tell_arguments(f"{separator}{_as_json(keyword)}: ")
            yield from self._value(MAX_DEPTH)
            separator = ", "
            if (yield from self.spaces()) != ")":
                yield from self.expect(",")
        yield from self.expect(")")
        self.tell_arguments("}")
        self.end_call()

    def _value(self, depth: int) -> Steps:
        char = yield from self.spaces()
        if depth == 0:
            raise Malformed
        if char in _INSIDE:
            yield from self._string(char)
        elif char == "[":
            yield from self._items("]", depth - 1)
        elif char == "(":
            yield from self._items(")", depth - 1)
        elif char == "{":
            yield from self._entries(depth - 1)
        else:
            word = yield from self.run(_WORD_RUN)
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                raise Malformed
            self.tell_arguments(_WORDS.get(word, word))

    def _items(self, closing: str, depth: int) -> Steps:
        yield from self.expect((yield from self.char()))
        self.tell_arguments("[")
        separator = ""
        while (yield from self.spaces()) != closing:
            self.tell_arguments(separator)
            yield from self._value(depth)
            separator = ", "
            if (yield from self.spaces()) != closing:
                yield from self.expect(",")
        yield from self.expect(closing)
        self.tell_arguments("]")

    def _entries(self, depth: int) -> Steps:
        yield from self.expect("{")
        self.tell_arguments("{")
        separator = ""
        while (char := (yield from self.spaces())) != "}":
            if char not in _INSIDE:
                raise Malformed
            self.tell_arguments(separator)
            yield from self._string(char)
            yield from self.spaces()
            yield from self.expect(":")
            self.tell_arguments(": ")
            yield from self._value(depth)
            separator = ", "
            if (yield from self.spaces()) != "}":
                yield from self.expect(",")
        yield from self.expect("}")
        self.tell_arguments("}")

    def _string(self, quote: str) -> Steps:
        yield from self.expect(quote)
        self.tell_arguments('"')
        while (char := (yield from self.char())) != quote:
            if char == "\\":
                yield from self._escape()
            else:
                piece = self.skip_run(_INSIDE[quote])
                self.tell_arguments(_as_json(piece)[1:-1])
        yield from self.expect(quote)
        self.tell_arguments('"')

    def _escape(self) -> Steps:
        """Read a backslash and what it escapes; one that escapes nothing stands for itself."""
        yield from self.expect("\\")
        char = yield from self.char()
        yield from self.expect(char)
        if char not in _NUM_HEX_DIGITS:
            self.tell_arguments(_as_json(_ESCAPED.get(char, "\\" + char))[1:-1])
            return
        digits = ""
        for _ in range(_NUM_HEX_DIGITS[char]):
            digits += yield from self.char()
            yield from self.expect(digits[-1])
        try:
            self.tell_arguments(_as_json(chr(int(digits, 16)))[1:-1])
        except (ValueError, OverflowError) as error:  # no number, or no character
            raise Malformed from error


def _as_json(text: str) -> str:
    """Raises ValueError for half a character, which no answer can hold."""
    written = json.dumps(text, ensure_ascii=False)
    written.encode()
    return written
