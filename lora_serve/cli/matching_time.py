"""A bound on the time that regular expressions of a hostile file take a library.

A pattern of twenty characters can take longer than the universe is old, and patterns that adapters
are trained with are too rich to be told from those by their looks.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_SAMPLE_SECONDS = 0.25


class MatchingTimeError(Exception):
    """Patterns took longer than they may."""


@contextmanager
def bounded_matching(seconds: float) -> Generator[None, None, None]:
    """Let calls of the module `re` take so much CPU time in all; only in the main thread.

    Raises:
        MatchingTimeError: they took more. Python's matcher looks for signals as it goes.
    """
    seconds_matching = 0.0

    def sample(_: int, frame: FrameType | None) -> None:
        nonlocal seconds_matching
        if _is_matching(frame):
            seconds_matching += _SAMPLE_SECONDS
        if seconds_matching > seconds:
            raise MatchingTimeError(f"its patterns took longer than {seconds:g} s to match")

    before = signal.signal(signal.SIGVTALRM, sample)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SAMPLE_SECONDS, _SAMPLE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _is_matching(frame: FrameType | None) -> bool:
    """Whether `re` compiles or matches: its own code calls the matcher, which has no frame."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "re":
            return True
        frame = frame.f_back
    return False
