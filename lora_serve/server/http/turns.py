"""One thread that works for several shares by turns, so that none waits for all calls of another.

A share is an API key's, or that of all callers without one. A turn is one call. Taking a turn costs
the same however many shares wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lora_serve.server.http.threads import run_to_end

Result = TypeVar("Result")


class ThreadByTurns:
    """Runs one call at a time: of the shares that wait, the one whose last turn is longest ago."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_taken = False

    async def run(self, share: str, call: Callable[[], Result]) -> Result:
        """What `call` returns, or raises, once it was its share's turn."""
        if self._is_taken:
            await self._turn(share, asyncio.get_running_loop().create_future())
        self._is_taken = True
        try:
            return await run_to_end(self._thread, call)
        finally:
            self._pass_on()

    async def _turn(self, share: str, turn: asyncio.Future[None]) -> None:
        self._waiting.setdefault(share, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given in the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the thread to the next that still waits for it."""
        while self._waiting:
            share, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[share] = turns  # at the end
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
