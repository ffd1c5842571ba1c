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

from lora_serve.server.http.body_shares import BodyShares, IncomingBody
from lora_serve.server.http.room import WAIT_SECONDS, Room

SECONDS_BETWEEN_LOOKS = 0.1


class BodyRoom(Room[IncomingBody]):
    """The bytes of all bodies that are being received and parsed."""

    _shares: BodyShares

    def __init__(self, limit: int, flag: str, wait_seconds: float = WAIT_SECONDS) -> None:
        """flag: which sets the limit, for messages."""
        super().__init__(
            BodyShares(),
            limit,
            what="bytes of a request body",
            work=f"read and parsed at once ({flag})",
            wait_seconds=wait_seconds,
        )
        self.flag = flag
        self._look: asyncio.TimerHandle | None = None  # runs while there are wishes

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
        if self._shares.amount > self.limit:
            self._look_for_room()

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
        return self._shares.amount + (wish.amount if wish else 0) - self.limit

    def _end_slow(self) -> None:
        wish = self._shares.next_wish
        num_needed = self._num_needed - self._shares.num_giving_way
        if num_needed <= 0:
            return
        fair_part = self.limit / self._shares.num_shares
        for body in self._shares.slow_bodies(wish.holding if wish else None, fair_part):
            num_needed -= body.amount
            body.give_way()
            if num_needed <= 0:
                return
