"""Shows the progress of a run: one line that is rewritten, or a line now and then in a log."""

from __future__ import annotations

import time
from typing import TextIO

from lora_serve.bench.client import RequestRecord


class Progress:
    """Counts records as they complete; `close` leaves the last line standing."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._interval = 0.2 if out.isatty() else 10.0  # seconds between lines
        self._start = self._last = time.perf_counter()
        self._done = self._failed = self._tokens = 0

    def __call__(self, record: RequestRecord) -> None:
        self._done += 1
        self._failed += record.error is not None
        self._tokens += record.output_tokens
        now = time.perf_counter()
        if now - self._last >= self._interval:
            self._last = now
            self._write()

    def close(self) -> None:
        self._write()
        if self._out.isatty():
            self._out.write("\n")

    def _write(self) -> None:
        rate = self._tokens / (time.perf_counter() - self._start)
        failed = f", {self._failed} failed" if self._failed else ""
        line = f"{self._done}/{self._total} requests{failed}, {rate:.1f} tokens/s"
        self._out.write(f"\r{line}\033[K" if self._out.isatty() else f"{line}\n")
        self._out.flush()
