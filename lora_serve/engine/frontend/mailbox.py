"""A queue of one task of the event loop, for what comes at each step and token.

asyncio's own has any number of takers and a bound, and costs several times as much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """items: what waits, oldest first. One task takes it; who puts something in never waits."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self.items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> T:
        """The oldest item, once there is one."""
        while not self.items:
            assert self._waiter is None, "two tasks wait for one mailbox"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.items.popleft()
