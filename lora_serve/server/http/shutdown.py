"""How a server ends: in its own time at the first signal, at once at the second.

Requests that still wait for the engine are answered with an error; connections that wait for
nothing but a client, which does not take its answer or does not send its request, are cut off.
Knows no routes, and no signals by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from lora_serve.errors import EngineDeadError
from lora_serve.server.http.connections import Connections
from lora_serve.server.http.drain import Drain

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 5  # in which a reader has to take the end of an answer that was ended
POLL_SECONDS = 0.02


class EndingEngine(Protocol):
    """What is asked of an engine at the end."""

    @property
    def is_paused(self) -> bool: ...

    async def resume(self) -> None: ...

    async def shutdown(self) -> None: ...


class ServerShutdown:
    """The shutdown of one server."""

    def __init__(
        self, engine: EndingEngine, drain: Drain, connections: Connections, timeout_seconds: float
    ) -> None:
        self._engine = engine
        self._drain = drain
        self._connections = connections
        self._timeout = timeout_seconds
        self._is_urgent = False
        self._task: asyncio.Task[None] | None = None

    def begin(self, then: Callable[[], None]) -> None:
        """End in time, and call `then` when nothing more can be answered; again: at once."""
        if self._task is not None:
            self._is_urgent = True
            return
        self._task = asyncio.get_running_loop().create_task(self._end(then), name="shutdown")

    async def _end(self, then: Callable[[], None]) -> None:
        self._drain.begin()
        num_active = self._drain.num_active
        logger.info(
            "stopping: waiting for %d running request%s", num_active, "" if num_active == 1 else "s"
        )
        await self._resume()
        await _until(lambda: self._is_urgent or self._all_is_sent, self._timeout)
        self._cut_off()
        await self._engine.shutdown()  # which ends the requests that still wait for it
        await _until(lambda: self._all_is_sent, LAST_WORDS_SECONDS)
        self._cut_off()
        then()

    async def _resume(self) -> None:
        """Let the requests that a pause keeps be answered; no caller could end it any more."""
        if self._engine.is_paused:
            with contextlib.suppress(EngineDeadError):  # those who wait for it are told
                await self._engine.resume()

    @property
    def _all_is_sent(self) -> bool:
        """Whether all bytes have left: long answers are complete before their clients have them."""
        return not (self._drain.num_active or self._connections.has_unsent)

    def _cut_off(self) -> None:
        """Close what waits for its client; say what is lost."""
        awaited, stalled = self._connections.unfinished()
        if awaited or stalled:
            logger.warning(
                "cut off: %d answers, with an error; %d connections whose clients had not taken "
                "all of an answer or sent all of a request",
                len(awaited),
                len(stalled),
            )
        for connection in stalled:
            connection.abort()


async def _until(is_true: Callable[[], bool], seconds: float) -> None:
    """Wait for it, but no longer than that."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not is_true():
                await asyncio.sleep(POLL_SECONDS)
