"""How many bytes of bodies are held at once, and which body gives way when there is no room.

A body is charged for what has come of it, so one that declares much and sends little holds little.
Where a large body finds no room, the slowest of those that are still coming give way, those of the
API key first that holds most: bodies that stall, or trickle, keep no other out, and one key's keep
another's out least. Small bodies wait for none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from lora_serve.errors import OverloadedError
from lora_serve.server.http.body_shares import BodyShares, IncomingBody, Wish

WAIT_SECONDS = 5.0
SECONDS_BETWEEN_LOOKS = 0.1


class BodyRoom:
    """The bytes of all bodies that are being received and parsed."""

    def __init__(self, limit: int, flag: str, wait_seconds: float = WAIT_SECONDS) -> None:
        """flag: which sets the limit, for messages."""
        self.flag = flag
        self.limit = limit
        self._wait_seconds = wait_seconds
        self._shares = BodyShares()
        self._look: asyncio.TimerHandle | None = None  # runs while there are wishes

    @contextmanager
    def hold(self, share: str = "") -> Iterator[IncomingBody]:
        """A body of which nothing has come; what is held of it is given back at the end.

        share: whose it is, an API key or "" for callers without one.
        """
        body = self._shares.open(share)
        try:
            yield body
        finally:
            self._shares.close(body)
            self._grant()

    @contextmanager
    def receive(self, body: IncomingBody, clock: asyncio.Timeout) -> Iterator[None]:
        """While its bytes come, `body` may have to give way: `clock` ends at once then."""
        self._shares.begin(body, clock)
        try:
            yield
        finally:
            self._shares.end(body)

    def add(self, body: IncomingBody, num_bytes: int) -> None:
        """Hold more of a small body, whether there is room or not; others make it."""
        self._shares.charge(body, num_bytes)
        if self._shares.num_bytes > self.limit:
            self._look_for_room()

    async def add_in_turn(self, body: IncomingBody, num_bytes: int) -> None:
        """Hold more of a large body, once there is room.

        First comes the share that holds least, and of its bodies the oldest: one that has begun
        waits for none of its share that came later. One that is larger than all the room is held
        alone.

        Raises:
            OverloadedError: others hold too much for too long, and none of them gives way.
        """
        if self._shares.is_first(body) and self._fits(body, num_bytes):
            self._shares.charge(body, num_bytes)
            return
        wish = Wish(body, num_bytes, asyncio.get_running_loop().create_future())
        self._shares.wait(wish)
        self._look_for_room()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await wish.turn
        except TimeoutError:
            raise OverloadedError(
                f"{num_bytes} bytes of a request body had no room for {self._wait_seconds:g} s "
                f"among the {self.limit} that are read and parsed at once "
                f"({self.flag}); retry later"
            ) from None
        finally:
            if self._shares.stop_waiting(wish):
                self._grant()

    def _fits(self, body: IncomingBody, num_bytes: int) -> bool:
        num_held = self._shares.num_bytes
        return num_held + num_bytes <= self.limit or num_held == body.num_bytes

    def _grant(self) -> None:
        while (wish := self._shares.next_wish) and self._fits(wish.body, wish.num_bytes):
            self._shares.stop_waiting(wish)
            self._shares.charge(wish.body, wish.num_bytes)
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
        wish = self._shares.next_wish
        return self._shares.num_bytes + (wish.num_bytes if wish else 0) - self.limit

    def _end_slow(self) -> None:
        wish = self._shares.next_wish
        num_needed = self._num_needed - self._shares.num_giving_way
        if num_needed <= 0:
            return
        fair_part = self.limit / self._shares.num_shares
        for body in self._shares.slow_bodies(wish.body if wish else None, fair_part):
            num_needed -= body.num_bytes
            body.give_way()
            if num_needed <= 0:
                return
