"""Whose bodies hold how many bytes, which share's turn is next, and which of them gives way.

A share is an API key's, or that of all callers without one. Those that wait stand in a list by what
they hold, so a turn costs no walk over the others. Knows neither limits nor the event loop's tasks.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

GRACE_SECONDS = 1.0  # in which a body need not give way: most have come whole by then

Place = tuple[int, float, str]  # of a share that waits: bytes held, oldest body's start, name


@dataclass(eq=False, slots=True)
class IncomingBody:
    """What is held of one body.

    clock: of its reception; None before and after. gave_way: it was ended to make room.
    """

    share: Share
    num_bytes: int = 0
    started: float = field(default_factory=time.monotonic)
    clock: asyncio.Timeout | None = None
    gave_way: bool = False

    def bytes_per_second(self, now: float) -> float:
        return self.num_bytes / (now - self.started)

    def give_way(self) -> None:
        assert self.clock is not None, "a body that is not coming cannot be ended"
        self.gave_way = True
        self.clock.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False, slots=True)
class Wish:
    """A body's next bytes, for which there is no room yet."""

    body: IncomingBody
    num_bytes: int
    turn: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class Share:
    """num_bodies: received or parsed now. wishes: oldest bodies first. place: while it waits."""

    name: str
    num_bytes: int = 0
    num_bodies: int = 0
    wishes: list[Wish] = field(default_factory=list)
    place: Place | None = None


class BodyShares:
    """The shares that hold bodies, or wait to."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self._waiting: list[Place] = []  # in order
        self._coming: set[IncomingBody] = set()
        self.num_bytes = 0  # held by all

    def open(self, name: str) -> IncomingBody:
        """A new body of the share of this name."""
        share = self._shares.setdefault(name, Share(name))
        share.num_bodies += 1
        return IncomingBody(share)

    def close(self, body: IncomingBody) -> None:
        self.charge(body, -body.num_bytes)
        body.share.num_bodies -= 1
        if not body.share.num_bodies:
            del self._shares[body.share.name]

    def charge(self, body: IncomingBody, num_bytes: int) -> None:
        body.num_bytes += num_bytes
        body.share.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._move(body.share)

    def begin(self, body: IncomingBody, clock: asyncio.Timeout) -> None:
        """Let it give way to others from here on: it is coming."""
        body.clock = clock
        self._coming.add(body)

    def end(self, body: IncomingBody) -> None:
        self._coming.discard(body)
        body.clock = None

    @property
    def num_shares(self) -> int:
        return len(self._shares)

    # ── turns ───────────────────────────────────────────────────────────────────────────────

    @property
    def next_wish(self) -> Wish | None:
        """The oldest body's, of the share that holds least of those that wait."""
        return self._shares[self._waiting[0][-1]].wishes[0] if self._waiting else None

    def is_first(self, body: IncomingBody) -> bool:
        """Whether a wish of this body would be the next."""
        place = (body.share.num_bytes, body.started, body.share.name)
        return not self._waiting or place < self._waiting[0]

    def wait(self, wish: Wish) -> None:
        insort(wish.body.share.wishes, wish, key=lambda each: each.body.started)
        self._move(wish.body.share)

    def stop_waiting(self, wish: Wish) -> bool:
        """Whether it was still waiting."""
        share = wish.body.share
        if wish not in share.wishes:
            return False
        share.wishes.remove(wish)
        self._move(share)
        return True

    def _move(self, share: Share) -> None:
        """Put a share where it belongs among those that wait."""
        if share.place is not None:
            del self._waiting[bisect_left(self._waiting, share.place)]
            share.place = None
        if share.wishes:
            share.place = (share.num_bytes, share.wishes[0].body.started, share.name)
            insort(self._waiting, share.place)

    # ── giving way ──────────────────────────────────────────────────────────────────────────

    @property
    def num_giving_way(self) -> int:
        """Bytes of bodies that were told to end, and have not yet."""
        return sum(body.num_bytes for body in self._coming if body.gave_way)

    def slow_bodies(self, asking: IncomingBody | None, fair_part: float) -> Iterator[IncomingBody]:
        """Bodies that should give way, in order: of the share that then holds most, the slowest.

        asking: for whom; None for small bodies, which wait for none. Another share's give way only
        if it holds more than the one that asks, or that asks for its only body; to small ones, if
        it holds more than `fair_part`.
        """
        own = asking.share if asking is not None else None
        floor = float(own.num_bytes) if own is not None else fair_part
        if own is not None and own.num_bodies == 1:
            floor = -1.0
        now = time.monotonic()
        given: defaultdict[Share, int] = defaultdict(int)
        slow: defaultdict[Share, list[IncomingBody]] = defaultdict(list)
        for body in self._coming:
            if body.gave_way:
                given[body.share] += body.num_bytes
            elif body is not asking and now - body.started >= GRACE_SECONDS:
                slow[body.share].append(body)
        fullest = [
            (given[share] - share.num_bytes, place, share) for place, share in enumerate(slow)
        ]
        heapify(fullest)
        for bodies in slow.values():
            bodies.sort(key=lambda body: -body.bytes_per_second(now))
        while fullest:
            held, place, share = fullest[0]
            if not slow[share] or (share is not own and -held <= floor):
                heappop(fullest)
                continue
            body = slow[share].pop()
            heapreplace(fullest, (held + body.num_bytes, place, share))
            yield body
