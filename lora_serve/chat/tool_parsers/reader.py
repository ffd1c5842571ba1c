"""Reads the calls behind a marker, as one syntax writes them. A new syntax is a subclass here.

A syntax is a generator over characters, which yields where it needs more text. So it reads like the
grammar that it is, and knows nothing of how the text is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import ClassVar

from lora_serve.chat.json_scanner import JsonScanner
from lora_serve.chat.parts import PartCollector

Schemas = Mapping[str, Mapping[str, object]]  # by the name of a tool, of its arguments
Steps = Generator[None, None, None]

ARGUMENT_KEYS = ("arguments", "parameters")
_SPACES = re.compile(r"[ \t\n\r]*")


class Malformed(Exception):
    """What comes is not the syntax."""


class CallReader:
    """The calls that follow one marker.

    A call is told as soon as its name and the beginning of its arguments are there; the name must
    be a tool's. What was read and is not told comes out as content if the call breaks before that.
    Then, and after the last call, `rest` is what was not read.
    """

    name_run: ClassVar[re.Pattern[str]] = re.compile(r"[A-Za-z0-9_.:/-]*")

    def __init__(self, schemas: Schemas, found: PartCollector, marker: str) -> None:
        """marker: what was read before, with the blanks before it."""
        self.rest: str | None = None
        self.has_ended_well = False
        self._schemas = schemas
        self._found = found
        self._untold = [marker]  # what was read since the last call or piece of arguments
        self._is_told = False  # the call that is being read
        self._has_ended = False  # some call has, and no other is being read
        self._text = ""
        self._position = 0
        self._steps = self.read()

    def read(self) -> Steps:
        """The syntax."""
        raise NotImplementedError

    def feed(self, text: str) -> None:
        self._text, self._position = text, 0
        try:
            next(self._steps)
        except StopIteration:
            self.rest = self._text[self._position :]
            self.has_ended_well = True
        except Malformed:
            self._found.content("".join(self._untold))
            self.rest = self._text[self._position :]

    def finish(self) -> None:
        """No more text comes. A call that was told stays as it is, cut off."""
        if not self._is_told and not self._has_ended:
            self._found.content("".join(self._untold))

    def char(self) -> Generator[None, None, str]:
        """The next character, which is not read yet."""
        while self._position == len(self._text):
            yield
        return self._text[self._position]

    def spaces(self) -> Generator[None, None, str]:
        """Read white space; returns the character after it."""
        while True:
            yield from self.char()
            self.skip_run(_SPACES)
            if self._position < len(self._text):
                return self._text[self._position]

    def expect(self, literal: str) -> Steps:
        for expected in literal:
            if (yield from self.char()) != expected:
                raise Malformed
            self._skip(1)

    def one_of(self, *literals: str) -> Generator[None, None, str]:
        """Read the one that comes; none may be the beginning of another."""
        taken = ""
        while True:
            taken += yield from self.char()
            literals = tuple(literal for literal in literals if literal.startswith(taken))
            if not literals:
                raise Malformed
            self._skip(1)
            if taken in literals:
                return taken

    def accept(self, literal: str) -> Steps:
        """Read `literal` and the white space before it, if both are there; else nothing."""
        mark = len(self._untold)
        try:
            yield from self.spaces()
            yield from self.expect(literal)
        except Malformed:  # as it was
            taken = "".join(self._untold[mark:])
            del self._untold[mark:]
            self._text, self._position = taken + self._text[self._position :], 0

    def run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Read the characters that `pattern` matches, up to one that it does not."""
        taken = []
        while True:
            yield from self.char()
            taken.append(self.skip_run(pattern))
            if self._position < len(self._text):
                return "".join(taken)

    def value(self, tell: Callable[[str], None]) -> Steps:
        """Read one JSON value, and tell its text as it comes."""
        scanner = JsonScanner()
        while not scanner.is_complete:
            yield from self.char()
            end = scanner.feed(self._text, self._position)
            tell(self._text[self._position : end])
            self._position = end
            if scanner.is_broken:
                raise Malformed

    def captured_value(self) -> Generator[None, None, str]:
        """Read one JSON value whole."""
        start = len(self._untold)
        yield from self.value(self._untold.append)
        return "".join(self._untold[start:])

    def json_call(self) -> Steps:
        """Read {"name": …, "arguments": {…}}, which may have other fields."""
        self.begin_reading()
        yield from self.expect("{")
        name, arguments = None, None
        while True:
            key = yield from self._key()
            if key == "name" and name is None:
                name = json.loads((yield from self.captured_value()))
                self._require_tool(name)
                if arguments is not None:
                    self.tell_call(name)
                    self._found.arguments(arguments)
            elif key in ARGUMENT_KEYS and arguments is None:
                arguments = yield from self._json_arguments(name)
            elif key == "name" or key in ARGUMENT_KEYS:  # twice
                raise Malformed
            else:
                yield from self.captured_value()
            if (yield from self.spaces()) == "}":
                break
            yield from self.expect(",")
        if not self._is_told:
            raise Malformed
        self._skip(1)
        self.end_call()

    def begin_reading(self) -> None:
        """The next call begins here."""
        self._has_ended = False

    def tell_call(self, name: str) -> None:
        """All that was read of this call so far is told; its arguments may follow."""
        self._require_tool(name)
        self._found.begin_call(name)
        self._is_told = True
        self._untold.clear()

    def tell_arguments(self, text: str) -> None:
        """The next piece of the arguments, which is all that was read since the last."""
        self._found.arguments(text)
        self._untold.clear()

    def arguments_of(self, name: str) -> Steps:
        """Tell a call, and read its arguments as they are."""
        if (yield from self.spaces()) != "{":
            raise Malformed
        self.tell_call(name)
        yield from self.value(self._found.arguments)

    def end_call(self) -> None:
        self._untold.clear()
        self._is_told = False
        self._has_ended = True

    def _key(self) -> Generator[None, None, str]:
        """Read the next key of an object with its colon."""
        if (yield from self.spaces()) != '"':
            raise Malformed
        key = str(json.loads((yield from self.captured_value())))
        yield from self.spaces()
        yield from self.expect(":")
        yield from self.spaces()
        return key

    def _json_arguments(self, name: str | None) -> Generator[None, None, str]:
        """Read arguments: told piece by piece if the name is known, else kept until it is."""
        if name is not None:
            yield from self.arguments_of(name)
            return ""
        if (yield from self.char()) != "{":
            raise Malformed
        return (yield from self.captured_value())

    def _require_tool(self, name: object) -> None:
        if not isinstance(name, str) or name not in self._schemas:
            raise Malformed

    def _skip(self, count: int) -> None:
        self._untold.append(self._text[self._position : self._position + count])
        self._position += count

    def skip_run(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._position)
        assert found is not None, "a run may be empty"
        self._skip(len(found.group()))
        return found.group()
