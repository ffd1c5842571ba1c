"""A server-wide bound on what is worked on at once, of which each request takes a share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lora_serve.errors import OverloadedError

WAIT_SECONDS = 5.0


class Budget:
    """Gives out shares in the order in which they were asked for.

    Each request takes one share, so none holds one while it waits for another.
    """

    def __init__(self, limit: int, what: str, wait_seconds: float = WAIT_SECONDS) -> None:
        """what: is counted, and how its limit is changed; for the message of a refusal."""
        self._limit = limit
        self._what = what
        self._wait_seconds = wait_seconds
        self._num_free = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def share(self, amount: int) -> AsyncIterator[None]:
        """Hold `amount` within. What is more than the whole budget is worked on alone.

        Raises:
            OverloadedError: others hold too much for too long.
        """
        amount = min(amount, self._limit)
        await self._take(amount)
        try:
            yield
        finally:
            self._give_back(amount)

    async def _take(self, amount: int) -> None:
        if amount <= self._num_free and not self._waiting:
            self._num_free -= amount
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (amount, turn)
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it was given in the same moment
                self._num_free += amount
            else:
                self._waiting.remove(place)
            self._wake()
            if not isinstance(error, TimeoutError):
                raise
            raise OverloadedError(
                f"{amount} {self._what} had no room for {self._wait_seconds:g} s among the "
                f"{self._limit} that are worked on at once; retry later"
            ) from None

    def _give_back(self, amount: int) -> None:
        self._num_free += amount
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._num_free:
            amount, turn = self._waiting.popleft()
            self._num_free -= amount
            turn.set_result(None)
