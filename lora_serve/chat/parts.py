"""What an answer's text is made of, in the order in which the model wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """index: counts an answer's tool calls."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """text: the next piece of the arguments, which are one JSON object."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


class PartParser(Protocol):
    """Finds the parts of one answer, whose text comes in pieces.

    How the text is cut into pieces changes nothing: what is told of all of them, joined, is the
    same. Each character costs a bounded amount of work. Text that is no part's syntax comes out as
    content: none is lost, none is made up.
    """

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""

    def finish(self) -> list[Part]:
        """The parts of what was held back, once no more text comes."""


class PartCollector:
    """Gathers what a parser finds in one piece of text; joins neighbours of one kind."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._parts: list[Part] = []
        self._kind: type[Content | CallArguments] = Content
        self._texts: list[str] = []  # of the part of that kind that still grows

    def content(self, text: str) -> None:
        self._add(Content, text)

    def begin_call(self, name: str) -> None:
        self._end_part()
        self._parts.append(CallBegin(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that was begun last."""
        self._add(CallArguments, text)

    def take(self) -> list[Part]:
        self._end_part()
        parts, self._parts = self._parts, []
        return parts

    def _add(self, kind: type[Content | CallArguments], text: str) -> None:
        if kind is not self._kind:
            self._end_part()
            self._kind = kind
        self._texts.append(text)

    def _end_part(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if text and self._kind is Content:
            self._parts.append(Content(text))
        elif text:
            self._parts.append(CallArguments(self.num_calls - 1, text))
