"""Asks /health all the time, as a load balancer does: how long it takes, and when it says no."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from benchmarks.soak.journal import UNEXPECTED, Journal
from lora_serve.bench.http_stream import HttpFault, Origin, request

PERIOD_SECONDS = 0.05


@dataclass(slots=True)
class HealthProbe:
    """seconds: how long each answer took, whatever it was."""

    origin: Origin
    journal: Journal
    seconds: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self._ask()

    async def _ask(self) -> None:
        begin = time.monotonic()
        try:
            async with request(self.origin, "GET", "/health", {}) as response:
                status, text = response.status, (await response.read()).decode()
        except (OSError, HttpFault) as error:
            status, text = 0, repr(error)
        end = time.monotonic()
        self.seconds.append(end - begin)
        if status != 200 and not self.journal.was_down(begin, end):
            self.journal.note(UNEXPECTED, f"/health: {status} {text}")


def permille_999(seconds: list[float]) -> float:
    """The 99.9th percentile; 0 of nothing."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(0.999 * len(ordered)))] if ordered else 0.0
