"""Changes of the catalog that are asked for on this replica, and who there is to follow them.

A change is planned on the record that the store has, and written if it still has that; else it is
planned anew, some times. What becomes of it on replicas is `replica.py`'s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lora_serve.catalog.base import CatalogStore
from lora_serve.catalog.plan import Plan
from lora_serve.catalog.records import Record, Standing
from lora_serve.catalog.rollout import LEASE_SECONDS
from lora_serve.errors import (
    CatalogRefusedError,
    CatalogUnavailableError,
    ChangeUnknownError,
    InvalidRequestError,
    NotFoundError,
)

MAX_TRIES = 20  # of one change, each after another one of the same name
MAX_PAUSE_SECONDS = 0.5


class CatalogChanges:
    """ask: calls a method of the store in a thread. check_ready: raises until that has answered."""

    def __init__(
        self,
        store: CatalogStore,
        ask: Callable[..., Awaitable[Any]],
        check_ready: Callable[[], None],
    ) -> None:
        self._store = store
        self._ask = ask
        self._check_ready = check_ready

    async def make(self, name: str, plan: Plan) -> Record:
        """Make a change of what the name stands for now; returns its record.

        Raises:
            CatalogUnavailableError: nothing was changed.
            ChangeUnknownError: whether it was is not known.
        """
        for number in range(MAX_TRIES):
            if (written := await self._try(name, plan)) is not None:
                return written
            await asyncio.sleep(random.uniform(0, min(MAX_PAUSE_SECONDS, 0.001 * 2**number)))
        raise CatalogUnavailableError(
            f"the catalog has refused {MAX_TRIES} tries to change '{name}', each time as if "
            "another change of it had come first; nothing was changed anywhere; see what else "
            "changes this name, or writes to the catalog, and try again"
        )

    async def _try(self, name: str, plan: Plan) -> Record | None:
        """Plan and write once; returns what is written, None if another change came first."""
        self._check_ready()
        try:
            current: Record | None = await self._ask(self._store.get, name)
        except CatalogUnavailableError as error:
            raise CatalogUnavailableError(f"{error}; nothing was changed anywhere") from error
        planned = plan(current)
        expected = 0 if current is None else current.serial
        try:
            written: Record | None = await self._ask(self._store.put, planned, expected)
        except CatalogRefusedError as error:
            raise CatalogUnavailableError(f"{error}; nothing was changed anywhere") from error
        except CatalogUnavailableError as error:
            raise ChangeUnknownError(
                f"{error}; whether '{name}' was changed is not known: /v1/models tells when "
                "the catalog answers"
            ) from error
        return written

    async def standings(self) -> Sequence[Standing]:
        """All replicas, as they have told last. Raises CatalogUnavailableError."""
        told: Sequence[Standing] = await self._ask(self._store.standings)
        return told

    async def forget(self, replica_id: str, *, has_ended: bool = False) -> None:
        """Wait no longer for a replica that is silent, or has ended as who runs it knows.

        Raises:
            NotFoundError: there is none of this id.
            InvalidRequestError: it has been heard from lately, so it may still answer.
        """
        found = [one for one in await self.standings() if one.member.replica_id == replica_id]
        if not found:
            raise NotFoundError(f"no replica '{replica_id}' is registered", "replica_id")
        if not has_ended and found[0].silent_seconds <= LEASE_SECONDS:
            raise InvalidRequestError(
                f"replica '{replica_id}' was heard from {found[0].silent_seconds:.0f} s ago, so it "
                "may still answer; stop it first",
                "replica_id",
            )
        await self._ask(self._store.leave, replica_id, found[0].member.incarnation)
