"""A bound on what is worked on at once, which API keys share.

Where there is no room, the key that holds least goes first: one that sends much keeps its own
requests waiting, and another's no longer than what is worked on now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic

from lora_serve.errors import OverloadedError
from lora_serve.server.http.shares import AnyHolding, Holding, Shares, Wish

WAIT_SECONDS = 5.0


class Room(Generic[AnyHolding]):
    """What all requests hold of one kind of thing."""

    def __init__(
        self,
        shares: Shares[AnyHolding],
        limit: int,
        *,
        what: str,
        work: str,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """what, work: for the message of a refusal: what is counted, and done at once."""
        self.limit = limit
        self._shares = shares
        self._what = what
        self._work = work
        self._wait_seconds = wait_seconds

    @contextmanager
    def hold(self, share: str = "") -> Iterator[AnyHolding]:
        """A request that holds nothing yet; what it comes to hold is given back at the end.

        share: whose it is, an API key or "" for callers without one.
        """
        holding = self._shares.open(share)
        try:
            yield holding
        finally:
            self._shares.close(holding)
            self._grant()

    async def add_in_turn(self, holding: AnyHolding, amount: int) -> None:
        """Hold more, once there is room.

        First comes the share that holds least, and of its requests the oldest: one that has begun
        waits for none of its share that came later. What is more than all the room is held alone.

        Raises:
            OverloadedError: others hold too much for too long.
        """
        if self._shares.is_first(holding) and self._fits(holding, amount):
            self._shares.charge(holding, amount)
            return
        wish = Wish(holding, amount, asyncio.get_running_loop().create_future())
        self._shares.wait(wish)
        self._look_for_room()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await wish.turn
        except TimeoutError:
            raise OverloadedError(
                f"{amount} {self._what} had no room for {self._wait_seconds:g} s among the "
                f"{self.limit} that are {self._work}; retry later"
            ) from None
        finally:
            if self._shares.stop_waiting(wish):
                self._grant()

    def _look_for_room(self) -> None:
        """Called when a request begins to wait. Here nothing gives way before its end."""

    def _fits(self, holding: Holding, amount: int) -> bool:
        num_held = self._shares.amount
        return num_held + amount <= self.limit or num_held == holding.amount

    def _grant(self) -> None:
        while (wish := self._shares.next_wish) and self._fits(wish.holding, wish.amount):
            self._shares.stop_waiting(wish)
            self._shares.charge(wish.holding, wish.amount)
            if not wish.turn.done():
                wish.turn.set_result(None)
