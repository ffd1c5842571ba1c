"""Waits for roll-outs: one watch of the store's reports for all who do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lora_serve.catalog.base import CatalogStore
from lora_serve.catalog.records import Record, Standing
from lora_serve.catalog.rollout import Rollout, rollout_of
from lora_serve.errors import CatalogUnavailableError

WATCH_SECONDS = 1.0  # of one wait for the store; then it is seen who has become silent
RETRY_SECONDS = 0.5

Told = Sequence[Standing] | CatalogUnavailableError


class RolloutWatch:
    """ask: calls a method of the store in a thread. `run` is a task of its owner's."""

    def __init__(self, store: CatalogStore, ask: Callable[..., Awaitable[Any]]) -> None:
        self._store = store
        self._ask = ask
        self._num_waiting = 0
        self._is_awaited = asyncio.Event()
        self._next: asyncio.Future[Told] | None = None

    async def rolled_out(self, record: Record, seconds: float) -> Rollout:
        """How far a change has come when no replica is waited for any more, or time is over.

        Raises:
            CatalogUnavailableError: the store was lost; the change itself may go on.
        """
        end = time.monotonic() + seconds
        self._num_waiting += 1
        self._is_awaited.set()
        try:
            told: Told = await self._ask(self._store.standings)
            while True:
                if isinstance(told, CatalogUnavailableError):
                    raise told
                rollout = rollout_of(record, told)
                if rollout.is_settled or time.monotonic() >= end:
                    return rollout
                if self._next is None:
                    self._next = asyncio.get_running_loop().create_future()
                told = await asyncio.shield(self._next)
        finally:
            self._num_waiting -= 1

    async def run(self) -> None:
        """Tell all who wait what replicas have reported, every second or as soon as one has."""
        number = -1
        while True:
            if not self._num_waiting:
                self._is_awaited.clear()
                await self._is_awaited.wait()
            told: Told
            waiting = None
            try:
                number = await self._ask(self._store.await_reports, number, WATCH_SECONDS)
                # Who begins to wait from here on may have changed something after this is read.
                waiting = self._take_waiting()
                told = await self._ask(self._store.standings)
            except CatalogUnavailableError as error:
                told, number = error, -1
                waiting = waiting or self._take_waiting()
            if waiting is not None:
                waiting.set_result(told)
            if isinstance(told, CatalogUnavailableError):
                await asyncio.sleep(RETRY_SECONDS)

    def _take_waiting(self) -> asyncio.Future[Told] | None:
        """What those wait for who wait now; the others will wait for another."""
        waiting, self._next = self._next, None
        return waiting
