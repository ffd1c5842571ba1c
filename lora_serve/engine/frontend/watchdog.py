"""Tells whether steps are being made while requests wait for them, and whether an engine hangs.

An engine may make no step for a while and be well: it reads an adapter, or waits for KV. Then it
answers when it is asked for something else. One that does not answer either hangs. The watchdog
ends nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable

from lora_serve.errors import EngineDeadError

PATIENT_SHARE = 0.5  # of the timeout has passed without a step when the engine is asked


class Watchdog:
    """timeout_seconds: 0 for no limit."""

    def __init__(self, timeout_seconds: float, clock: Callable[[], float]) -> None:
        self._timeout = timeout_seconds
        self._clock = clock
        self._last_progress = clock()
        self._asked_at: float | None = None  # when it was asked for a reply that has not come

    def note_step(self) -> None:
        self._last_progress = self._clock()
        self._asked_at = None

    def note_reply(self) -> None:
        """The engine has answered something, so it does not hang."""
        self._asked_at = None

    def note_asked(self) -> None:
        self._asked_at = self._clock()

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

    def must_ask(self, num_unfinished: int) -> bool:
        """Whether the engine has to show by some reply that it does not hang."""
        patience = self._timeout * PATIENT_SHARE
        seconds = self._clock() - self._last_progress
        return bool(num_unfinished) and self._asked_at is None and seconds > patience

    def hangs(self, num_unfinished: int) -> bool:
        """Whether there was no step for the timeout, and no reply since it was asked for one.

        It has the other half of the timeout for the reply even if this process stood still, too.
        """
        if self._asked_at is None or not num_unfinished:
            return False
        now, patience = self._clock(), self._timeout * (1 - PATIENT_SHARE)
        return now - self._asked_at > patience and now - self._last_progress > self._timeout
