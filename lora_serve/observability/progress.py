"""How far something long has come: a bar on a terminal, and one line of the log at its end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from lora_serve.observability.sizes import shown_bytes

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_BARS = 0.1
_WIDTH = 30
_START_OF_LINE = "\r\x1b[K"


class Progress:
    """A number of bytes on its way to a total.

    Example:
        >>> with Progress("weights read", total_bytes) as progress:
        ...     progress.note(num_bytes)
    """

    def __init__(
        self,
        what: str,
        total_bytes: int,
        terminal: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """terminal: stderr if left out; nothing is drawn where that is no terminal."""
        self._what = what
        self._total = total_bytes
        self._terminal = terminal or sys.stderr
        self._clock = clock
        self._num_bytes = 0
        self._started = self._drawn = clock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._terminal.isatty():
            self._terminal.write(_START_OF_LINE)
            self._terminal.flush()
        if kind is None:
            seconds = self._clock() - self._started
            logger.info("%s: %s in %.1f s", self._what, shown_bytes(self._num_bytes), seconds)

    def note(self, num_bytes: int) -> None:
        """So many bytes more are done."""
        self._num_bytes += num_bytes
        now = self._clock()
        if now - self._drawn >= SECONDS_BETWEEN_BARS and self._terminal.isatty():
            self._drawn = now
            self._terminal.write(_START_OF_LINE + self._bar())
            self._terminal.flush()

    def _bar(self) -> str:
        part = min(1.0, self._num_bytes / self._total) if self._total else 1.0
        done = round(part * _WIDTH)
        bar = "█" * done + "░" * (_WIDTH - done)
        size = f"{shown_bytes(self._num_bytes)} of {shown_bytes(self._total)}"
        return f"{self._what} {bar} {part:4.0%}  {size}"
