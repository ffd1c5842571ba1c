"""Which bodies give way to others, so that one that stalls keeps none out.

Knows neither limits nor the event loop's tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from lora_serve.server.http.shares import Holding, Share, Shares

GRACE_SECONDS = 1.0  # in which a body need not give way: most have come whole by then
SHORTEST_SECONDS = 1e-3  # of a body's own time: less tells nothing of how fast it comes


@dataclass(eq=False, slots=True)
class IncomingBody(Holding):
    """What is held of one body, in bytes.

    clock: of its reception; None before and after. gave_way: it was ended to make room.
    """

    clock: asyncio.Timeout | None = None
    gave_way: bool = False

    def bytes_per_second(self, now: float) -> float:
        """How fast it comes; that it waits for room is no fault of its sender."""
        return self.amount / max(self.own_seconds(now), SHORTEST_SECONDS)

    def give_way(self) -> None:
        assert self.clock is not None, "a body that is not coming cannot be ended"
        self.gave_way = True
        self.clock.reschedule(asyncio.get_running_loop().time())


class BodyShares(Shares[IncomingBody]):
    """The shares that hold bytes of bodies, or wait to."""

    def __init__(self) -> None:
        super().__init__(IncomingBody)
        self._coming: set[IncomingBody] = set()

    def begin(self, body: IncomingBody, clock: asyncio.Timeout) -> None:
        """Let it give way to others from here on: it is coming."""
        body.clock = clock
        self._coming.add(body)

    def end(self, body: IncomingBody) -> None:
        self._coming.discard(body)
        body.clock = None

    @property
    def num_giving_way(self) -> int:
        """Bytes of bodies that were told to end, and have not yet."""
        return sum(body.amount for body in self._coming if body.gave_way)

    def slow_bodies(self, asking: Holding | None, fair_part: float) -> Iterator[IncomingBody]:
        """Bodies that should give way, in order: of the share that then holds most, the slowest.

        asking: for whom; None for small bodies, which wait for none. Another share's give way only
        if it holds more than the one that asks, or that asks for its only body; to small ones, if
        it holds more than `fair_part`.
        """
        own = asking.share if asking is not None else None
        floor = float(own.amount) if own is not None else fair_part
        if own is not None and own.num_holdings == 1:
            floor = -1.0
        now = time.monotonic()
        given: defaultdict[Share, int] = defaultdict(int)
        slow: defaultdict[Share, list[IncomingBody]] = defaultdict(list)
        for body in self._coming:
            if body.gave_way:
                given[body.share] += body.amount
            elif body is not asking and now - body.started >= GRACE_SECONDS:
                slow[body.share].append(body)
        fullest = [(given[share] - share.amount, place, share) for place, share in enumerate(slow)]
        heapify(fullest)
        for bodies in slow.values():
            bodies.sort(key=lambda body: -body.bytes_per_second(now))
        while fullest:
            held, place, share = fullest[0]
            if not slow[share] or (share is not own and -held <= floor):
                heappop(fullest)
                continue
            body = slow[share].pop()
            heapreplace(fullest, (held + body.amount, place, share))
            yield body
