"""Tells whether steps are being made while requests wait for them. It ends nothing itself."""

from __future__ import annotations

from collections.abc import Callable

from lora_serve.errors import EngineDeadError


class Watchdog:
    """timeout_seconds: 0 for no limit."""

    def __init__(self, timeout_seconds: float, clock: Callable[[], float]) -> None:
        self._timeout = timeout_seconds
        self._clock = clock
        self._last_progress = clock()

    def note_step(self) -> None:
        self._last_progress = self._clock()

    def note_request(self, num_unfinished: int) -> None:
        """A request comes in beside `num_unfinished` others; the first one starts the clock."""
        if num_unfinished == 0:
            self._last_progress = self._clock()

    def check(self, num_unfinished: int) -> None:
        """Raise EngineDeadError if requests have waited too long for a step."""
        seconds = self._clock() - self._last_progress
        if self._timeout and num_unfinished and seconds > self._timeout:
            raise EngineDeadError(
                f"the engine stands still: {num_unfinished} waiting, and no step has been "
                f"finished for {seconds:.0f} s (--step-timeout {self._timeout:g})"
            )
