"""When something was killed or stopped, and not yet there again: what excuses a refusal."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STORE = "the store"
MACHINE = "the machine"
LOOK_SECONDS, STILL_SECONDS = 0.5, 3.0


@dataclass(slots=True)
class _Span:
    whom: str
    begin: float
    end: float = math.inf


@dataclass(slots=True)
class Troubles:
    """counts: of what was done, by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    _spans: list[_Span] = field(default_factory=list)

    @contextmanager
    def of(self, whom: str, what: str) -> Iterator[None]:
        """whom: STORE, or a server's address. Until the end of this it is not as it should be."""
        self.counts[what] += 1
        span = _Span(whom, time.monotonic())
        self._spans.append(span)
        yield
        span.end = time.monotonic()

    def met(self, whom: str, begin: float, end: float) -> bool:
        """Whether anything was wrong with it at some time between these."""
        return any(s.whom == whom and s.begin <= end and s.end >= begin for s in self._spans)

    async def watch_machine(self) -> None:
        """Note, until it is cancelled, when this process could not run: servers could not, either.

        Their deadlines have passed when they go on, so they may close connections.
        """
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if now - last > STILL_SECONDS:
                self._spans.append(_Span(MACHINE, last, now + STILL_SECONDS))
            last = now

    def met_any(self, begin: float, end: float) -> bool:
        return any(s.begin <= end and s.end >= begin for s in self._spans)
