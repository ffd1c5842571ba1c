"""How many bytes of bodies are held at once, and which body gives way when there is no room.

A body is charged for what has come of it, so one that declares much and sends little holds little.
Where a large body finds no room, the slowest of those that are still coming give way: bodies that
stall, or trickle, keep no other out. Small bodies wait for none.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lora_serve.errors import OverloadedError

WAIT_SECONDS = 5.0
GRACE_SECONDS = 1.0  # in which a body need not give way: most have come whole by then
SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(eq=False, slots=True)
class IncomingBody:
    """What is held of one body.

    clock: of its reception; None before and after. gave_way: it was ended to make room.
    """

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
class _Wish:
    body: IncomingBody
    num_bytes: int
    turn: asyncio.Future[None]


class BodyRoom:
    """The bytes of all bodies that are being received and parsed."""

    def __init__(self, limit: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self._limit = limit
        self._wait_seconds = wait_seconds
        self._num_held = 0
        self._coming: set[IncomingBody] = set()
        self._wishes: list[_Wish] = []  # oldest bodies first
        self._look: asyncio.TimerHandle | None = None  # runs while there are wishes

    @contextmanager
    def hold(self) -> Iterator[IncomingBody]:
        """A body of which nothing has come; what is held of it is given back at the end."""
        body = IncomingBody()
        try:
            yield body
        finally:
            self._num_held -= body.num_bytes
            self._grant()

    @contextmanager
    def receive(self, body: IncomingBody, clock: asyncio.Timeout) -> Iterator[None]:
        """While its bytes come, `body` may have to give way: `clock` ends at once then."""
        body.clock = clock
        self._coming.add(body)
        try:
            yield
        finally:
            self._coming.discard(body)
            body.clock = None

    def add(self, body: IncomingBody, num_bytes: int) -> None:
        """Hold more of a small body, whether there is room or not; others make it."""
        self._charge(body, num_bytes)
        if self._num_held > self._limit:
            self._look_for_room()

    async def add_in_turn(self, body: IncomingBody, num_bytes: int) -> None:
        """Hold more of a large body, once there is room, oldest first.

        So a body that has begun waits for none that came later. One that is larger than all the
        room is held alone.

        Raises:
            OverloadedError: others hold too much for too long, and none of them is slow.
        """
        is_first = not self._wishes or body.started < self._wishes[0].body.started
        if is_first and self._fits(body, num_bytes):
            self._charge(body, num_bytes)
            return
        wish = _Wish(body, num_bytes, asyncio.get_running_loop().create_future())
        insort(self._wishes, wish, key=lambda wish: wish.body.started)
        self._look_for_room()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await wish.turn
        except TimeoutError:
            raise OverloadedError(
                f"{num_bytes} bytes of a request body had no room for {self._wait_seconds:g} s "
                f"among the {self._limit} that are read and parsed at once "
                "(--max-total-body-bytes); retry later"
            ) from None
        finally:
            if wish in self._wishes:
                self._wishes.remove(wish)
                self._grant()

    def _charge(self, body: IncomingBody, num_bytes: int) -> None:
        body.num_bytes += num_bytes
        self._num_held += num_bytes

    def _fits(self, body: IncomingBody, num_bytes: int) -> bool:
        return self._num_held + num_bytes <= self._limit or self._num_held == body.num_bytes

    def _grant(self) -> None:
        while self._wishes and self._fits(self._wishes[0].body, self._wishes[0].num_bytes):
            wish = self._wishes.pop(0)
            self._charge(wish.body, wish.num_bytes)
            if not wish.turn.done():
                wish.turn.set_result(None)

    def _look_for_room(self) -> None:
        """End bodies that are slow, and look again as long as there is too little room."""
        if self._look is None:
            self._end_slow()
            self._look = asyncio.get_running_loop().call_later(SECONDS_BETWEEN_LOOKS, self._looked)

    def _looked(self) -> None:
        self._look = None
        self._grant()
        if self._num_needed > 0:
            self._look_for_room()

    @property
    def _num_needed(self) -> int:
        """How many bytes must be given back before the first of those that wait can go on."""
        wanted = self._wishes[0].num_bytes if self._wishes else 0
        return self._num_held + wanted - self._limit

    def _end_slow(self) -> None:
        now = time.monotonic()
        asking = self._wishes[0].body if self._wishes else None
        num_needed = self._num_needed - sum(b.num_bytes for b in self._coming if b.gave_way)
        slow = [
            body
            for body in self._coming
            if not (body is asking or body.gave_way) and now - body.started >= GRACE_SECONDS
        ]
        for body in sorted(slow, key=lambda body: body.bytes_per_second(now)):
            if num_needed <= 0:
                return
            num_needed -= body.num_bytes
            body.give_way()
