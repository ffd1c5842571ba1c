"""Counts calls of Python functions: a cost that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class PythonCalls:
    """num: so many until the block ends."""

    def __init__(self) -> None:
        self.num = 0

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        self.num += event == "call"


@contextmanager
def python_calls() -> Iterator[PythonCalls]:
    """Count the calls of the block, in its thread. A profiler that runs is left out meanwhile."""
    calls, before = PythonCalls(), sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
