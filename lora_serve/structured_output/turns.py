"""Whose mask is computed next: each grammar that waits has one turn, then the next."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from lora_serve.structured_outputs import StructuredOutput

T = TypeVar("T")
_Line = tuple[StructuredOutput, bool]  # one grammar's first masks, or its other ones


class Turns(Generic[T]):
    """What is to be done for answers, at most one thing for each; everything here is O(1).

    First masks of a grammar have turns of their own: they wait only for one another.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[_Line, OrderedDict[str, T]] = OrderedDict()  # the next one first
        self._line_of: dict[str, _Line] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def put(
        self, request_id: str, constraint: StructuredOutput, task: T, *, is_first: bool
    ) -> None:
        line = self._line_of[request_id] = constraint, is_first
        self._lines.setdefault(line, OrderedDict())[request_id] = task

    def get(self, request_id: str) -> T | None:
        line = self._line_of.get(request_id)
        return None if line is None else self._lines[line][request_id]

    def discard(self, request_id: str) -> None:
        line = self._line_of.pop(request_id, None)
        if line is not None:
            del self._lines[line][request_id]
            if not self._lines[line]:
                del self._lines[line]

    def take(self) -> T:
        """Remove the oldest task of the grammar whose turn it is."""
        line, tasks = self._lines.popitem(last=False)
        request_id, task = tasks.popitem(last=False)
        del self._line_of[request_id]
        if tasks:
            self._lines[line] = tasks
        return task
