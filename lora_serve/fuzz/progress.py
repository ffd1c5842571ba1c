"""Shows the progress of a run in one line: rewritten on a terminal, now and then in a log."""

from __future__ import annotations

import time
from typing import TextIO

TERMINAL_INTERVAL_SECONDS = 0.2
LOG_INTERVAL_SECONDS = 15.0


class ProgressLine:
    """`show` as often as you like; `close` leaves the last line standing."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._interval = TERMINAL_INTERVAL_SECONDS if self._is_terminal else LOG_INTERVAL_SECONDS
        self._last = time.monotonic() - self._interval
        self._text = ""

    def show(self, text: str) -> None:
        self._text = text
        if time.monotonic() - self._last >= self._interval:
            self._write()

    def close(self) -> None:
        self._write()
        if self._is_terminal:
            self._out.write("\n")

    def _write(self) -> None:
        self._last = time.monotonic()
        self._out.write(f"\r{self._text}\033[K" if self._is_terminal else f"{self._text}\n")
        self._out.flush()
