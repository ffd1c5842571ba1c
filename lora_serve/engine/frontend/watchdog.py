"""Tells whether steps are being made while requests wait for them, and whether an engine hangs.

An engine may make no step for a while and be well: it reads an adapter, or waits for KV. Then it
answers when it is asked for something else. One that does not answer either hangs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from lora_serve.engine.frontend.calls import NO_CALL
from lora_serve.errors import EngineDeadError
from lora_serve.messages import EngineMessage, GetStats

logger = logging.getLogger(__name__)

LONGEST_LOOK_SECONDS = 1.0  # between two looks at the engine

PATIENT_SHARE = 0.5  # of the timeout has passed without a step when the engine is asked


class Watched(Protocol):
    """The engine process, as its supervisor has it."""

    @property
    def is_serving(self) -> bool: ...

    async def send(self, message: EngineMessage) -> None: ...

    async def end(self, error: EngineDeadError) -> None: ...


class Watchdog:
    """Knows when the last step was finished. timeout: in seconds; 0 for no limit."""

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self.timeout = timeout
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
        if self.timeout and num_unfinished and seconds > self.timeout:
            raise EngineDeadError(
                f"the engine stands still: {num_unfinished} waiting, and no step has been "
                f"finished for {seconds:.0f} s (--step-timeout {self.timeout:g})"
            )

    def must_ask(self, num_unfinished: int) -> bool:
        """Whether the engine has to show by some reply that it does not hang."""
        patience = self.timeout * PATIENT_SHARE
        seconds = self._clock() - self._last_progress
        return bool(num_unfinished) and self._asked_at is None and seconds > patience

    def hangs(self, num_unfinished: int) -> bool:
        """Whether there was no step for the timeout, and no reply since it was asked for one.

        It has the other half of the timeout for the reply even if this process stood still, too.
        """
        if self._asked_at is None or not num_unfinished:
            return False
        now, patience = self._clock(), self.timeout * (1 - PATIENT_SHARE)
        return now - self._asked_at > patience and now - self._last_progress > self.timeout


async def end_if_it_hangs(
    engine: Watched, watchdog: Watchdog, num_unfinished: Callable[[], int]
) -> None:
    """End each engine that makes no step for the timeout and answers nothing either; for ever."""
    while watchdog.timeout:
        await asyncio.sleep(min(watchdog.timeout / 10, LONGEST_LOOK_SECONDS))
        try:
            if engine.is_serving:
                await _look(engine, watchdog, num_unfinished())
        except EngineDeadError:
            continue  # as the supervisor tells
        except Exception:  # a bug must not end the watch
            logger.exception("the engine could not be looked at")


async def _look(engine: Watched, watchdog: Watchdog, num_unfinished: int) -> None:
    if watchdog.must_ask(num_unfinished):
        watchdog.note_asked()
        await engine.send(GetStats(NO_CALL))
    elif watchdog.hangs(num_unfinished):
        await engine.end(
            EngineDeadError(
                f"the engine hangs: no step and no reply for {watchdog.timeout:g} s; it was ended "
                "(--step-timeout allows more)"
            )
        )
