"""Keeps an engine process running: notices that one has died, and starts the next.

Knows nothing of what engines are asked; its `EngineUser` says what a new one must be told. A new
engine has to hold the very model that the first one had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Protocol

from lora_serve.config import EngineConfig
from lora_serve.errors import ConfigError, EngineDeadError, LoraServeError
from lora_serve.messages import EngineMessage, EngineReady, EngineReply

logger = logging.getLogger(__name__)

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 30.0
STABLE_SECONDS = 60.0


class Client(Protocol):
    """One engine process: `EngineClient`, or a test's own."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def pid(self) -> int | None: ...

    async def start(self, config: EngineConfig) -> EngineReady: ...

    async def send(self, message: EngineMessage) -> None: ...

    async def receive(self) -> EngineReply: ...

    async def kill(self) -> None: ...

    async def close(self) -> None: ...


class EngineUser(Protocol):
    """The caller of the engine, which has to live through its deaths."""

    async def take_in(self, reply: EngineReply) -> None: ...

    def engine_died(self, error: EngineDeadError) -> None:
        """No reply comes any more, and nothing can be sent until `engine_is_back`."""

    def restart_failed(self, error: Exception) -> None:
        """The engine could not be started again; that will be tried once more, later."""

    def first_messages(self) -> Sequence[EngineMessage]:
        """What a new engine has to know before anything else."""

    async def engine_is_back(self) -> None:
        """A new engine has been told that; from here on it can be asked."""


class Backoff:
    """Tells how long to wait before a restart: not at all after a stable time, then ever longer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock()
        self._num_failures = 0

    def note_started(self) -> None:
        self._started_at = self._clock()

    def next_delay(self) -> float:
        """Seconds to wait now that the engine has died, or has not come up."""
        if self._clock() - self._started_at >= STABLE_SECONDS:
            self._num_failures = 0
        self._num_failures += 1
        if self._num_failures == 1:
            return 0.0
        return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** (self._num_failures - 2))


class EngineSupervisor:
    """The engine of this moment. `close` ends it for good."""

    def __init__(
        self,
        config: EngineConfig,
        client: Client,
        ready: EngineReady,
        user: EngineUser,
        make_client: Callable[[], Client],
        backoff: Backoff | None = None,
    ) -> None:
        """`client` has been started, and answered with `ready`."""
        cache = replace(config.cache, num_gpu_blocks_override=ready.num_blocks or None)
        self._config = replace(config, cache=cache)  # what fitted the pool must fit the next one
        self._client = client
        self._ready = ready
        self._user = user
        self._make_client = make_client
        self._backoff = backoff or Backoff()
        self._is_serving = True
        self._fault: EngineDeadError | None = None  # for which the engine was ended
        self._next: Client | None = None  # being started
        self.num_restarts = 0
        self._task = asyncio.create_task(self._run(), name="engine-supervisor")

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine that can be asked."""
        return self._is_serving and self._client.is_alive

    @property
    def pid(self) -> int | None:
        return self._client.pid

    async def send(self, message: EngineMessage) -> None:
        """Raises EngineDeadError while there is none to be asked."""
        await self._client.send(message)

    async def end(self, fault: EngineDeadError) -> None:
        """End an engine that is of no use any more, as if it had died of `fault`."""
        self._fault = fault
        await self._client.kill()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._is_serving = False
        await self._client.close()
        if self._next is not None:
            await self._next.close()

    async def _run(self) -> None:
        while True:
            error = await self._serve()
            self._is_serving = False
            if self._fault is not None:
                error, self._fault = self._fault, None
            with self._going_on():
                self._user.engine_died(error)
            with self._going_on():
                await self._client.kill()
                await self._client.close()
            await self._replace()

    @contextlib.contextmanager
    def _going_on(self) -> Generator[None, None, None]:
        """A bug here must not end the supervisor: those who wait are told, and others served."""
        try:
            yield
        except Exception as error:
            logger.exception("the engine's supervisor failed by a bug, and goes on")
            self._user.restart_failed(error)

    async def _serve(self) -> EngineDeadError:
        """Pass replies on until the engine is dead, or cannot be read; returns how it died."""
        try:
            while True:
                await self._user.take_in(await self._client.receive())
        except EngineDeadError as error:
            return error
        except Exception:  # a bug; without this, all callers would wait for ever
            logger.exception("a reply of the engine cannot be read; it is ended")
            return EngineDeadError("the engine's replies cannot be read; see the log")

    async def _replace(self) -> None:
        since = time.monotonic()
        while True:
            delay = self._backoff.next_delay()
            logger.warning("starting the engine again in %.0f s", delay)
            await asyncio.sleep(delay)
            try:
                await self._start_next()
            except Exception as error:  # files or memory may be short now, and not for ever
                is_told = isinstance(error, LoraServeError)
                logger.error(
                    "the engine could not be started again: %s", error, exc_info=not is_told
                )
                self._user.restart_failed(error)
            else:
                break
        self._backoff.note_started()
        self.num_restarts += 1
        away = time.monotonic() - since
        logger.warning("the engine is back after %.1f s, process %s", away, self.pid)
        with self._going_on():
            await self._user.engine_is_back()

    async def _start_next(self) -> None:
        client = self._next = self._make_client()
        try:
            ready = await client.start(self._config)
            if ready.fingerprint != self._ready.fingerprint:
                raise ConfigError(
                    "the model's files have changed since the server was started; restore them, "
                    "or restart the server to serve what they hold now"
                )
            for message in self._user.first_messages():
                await client.send(message)
        except Exception:
            self._next = None
            await client.kill()
            await client.close()
            raise
        self._client, self._next = client, None
        self._is_serving = True
