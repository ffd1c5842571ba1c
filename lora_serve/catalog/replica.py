"""One replica at work: keeps what its engine has in step with the catalog, and says so.

One task keeps the replica registered and asks for everything where it must, one follows the
changes. All decisions are the view's (view.py); the store is asked in threads of the replica's own.
Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from lora_serve.catalog.base import CatalogStore
from lora_serve.catalog.changes import CatalogChanges
from lora_serve.catalog.engine_work import Applied, CheckName, Engine, EngineWork
from lora_serve.catalog.records import Change, Member, Record, Report, Snapshot
from lora_serve.catalog.rollout import Rollout
from lora_serve.catalog.rollout_watch import RolloutWatch
from lora_serve.catalog.view import Admission, CatalogView
from lora_serve.errors import AdapterUnavailableError, CatalogUnavailableError

logger = logging.getLogger(__name__)

RENEW_SECONDS = 2.0
AWAKE_SECONDS = 1.0  # between two signs to the view that this process runs
RETRY_STORE_SECONDS = 0.5
WATCH_SECONDS = 1.0  # of one wait for the store, so that the end is noticed
ASK_SECONDS = 5.0  # for which a request waits until the store has been asked
STORE_SECONDS = 15.0  # of one answer of the store: longer than its own timeouts, if it keeps them
NUM_THREADS = 6  # two wait for the store all the time

REQUESTS_GO_ON = "requests go on, changes of adapters are refused"
REQUESTS_STOP = "requests for adapters are refused, and so are changes of adapters,"


def seconds_with_sleep() -> float:
    """A clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class CatalogReplica:
    """Use as `async with replica.running()`.

    applied: told each record that the engine has come to have, with what it had before.
    check_name: raises AdapterError for names that no adapter can have on this server.
    """

    def __init__(
        self,
        store: CatalogStore,
        engine: Engine,
        member: Member,
        *,
        wait_seconds: float = 30.0,
        applied: Applied = lambda record, before: None,
        check_name: CheckName = lambda name: None,
        clock: Callable[[], float] = seconds_with_sleep,
    ) -> None:
        """wait_seconds: for which a request waits for a name that is on its way."""
        self.member = member
        self.view = CatalogView(member)
        self.is_store_up = False
        self._store = store
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="catalog")
        self._asking = asyncio.Lock()
        self._num_asks = 0
        self._has_news = asyncio.Event()  # for the store: the report may have changed
        self._is_current = asyncio.Event()
        self._changed: dict[str, asyncio.Event] = {}  # by name; those who wait for it have one
        self._has_joined = False
        self._told_effect = ""  # of the store's loss; none while it answers
        self._replaced_by: Member | None = None
        self.changes = CatalogChanges(store, self._ask, self.check_ready)
        self._rollouts = RolloutWatch(store, self._ask)
        self._work = EngineWork(self.view, engine, applied, self._note_change, check_name)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CatalogReplica]:
        """Follow the catalog; at the end sign off, so that no roll-out waits for this replica."""
        self.view.note_awake(self._clock())
        tasks = [
            asyncio.create_task(_kept_up(run), name=f"catalog-{run.__name__.strip('_')}")
            for run in (self._stay_awake, self._keep, self._follow, self._rollouts.run)
        ]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._work.close()
            with contextlib.suppress(CatalogUnavailableError):
                member = self.member
                await self._ask(self._store.leave, member.replica_id, member.incarnation)
            await asyncio.to_thread(self._store.close)  # what still waits for an answer ends
            await asyncio.to_thread(self._threads.shutdown)

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def check_ready(self) -> None:
        """Raise CatalogUnavailableError until the catalog has told what there is."""
        if not self.view.is_current:
            raise self._not_asked()

    async def wait_until_ready(self) -> None:
        """Wait until the catalog has told what there is, some seconds at most.

        Raises:
            CatalogUnavailableError: it has not by then.
        """
        await self._wait_until_current()

    async def wait_until_known(self, record: Record) -> None:
        """Wait until this replica has heard of a change that was made here."""
        deadline = self._clock() + self._wait_seconds
        while self.view.serial < record.serial:
            await self._wait_for(record.name, deadline)

    async def wait_until_told(self, name: str) -> None:
        """Wait until this replica has heard of the last change of a name, wherever it was made.

        Raises:
            CatalogUnavailableError: the store cannot be asked.
        """
        record: Record | None = await self._ask(self._store.get, name)
        if record is not None:
            await self.wait_until_known(record)

    async def admit(self, name: str) -> bool:
        """Wait until a request for this name may go to the engine; False if there is no such name.

        Raises:
            AdapterUnavailableError: it is not served here, or not yet.
            CatalogUnavailableError: this replica does not know what the name stands for now.
        """
        deadline = self._clock() + self._wait_seconds
        while True:
            match self.view.admission(name, self._clock()):
                case Admission.ADMIT:
                    return True
                case Admission.UNKNOWN:
                    return False
                case Admission.REFUSE:
                    raise self.refusal(name)
                case Admission.ASK:
                    await self._wait_until_current()
                case Admission.WAIT:
                    self.view.prefer(name)
                    await self._wait_for(name, deadline)

    async def _wait_until_current(self) -> None:
        self.view.note_awake(self._clock())  # which notices a sleep
        if self.view.is_current:
            return
        self._is_current.clear()
        self._has_news.set()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await self._is_current.wait()
        except TimeoutError:
            raise self._not_asked() from None

    async def _wait_for(self, name: str, deadline: float) -> None:
        changed = self._changed.setdefault(name, asyncio.Event())
        try:
            async with asyncio.timeout(deadline - self._clock()):
                await changed.wait()
        except TimeoutError:
            raise self.refusal(name) from None

    def refusal(self, name: str) -> AdapterUnavailableError:
        """Why a name takes no requests, without paths: those are for admins alone."""
        record, failure = self.view.record(name), self.view.failure(name)
        if failure is None:
            return AdapterUnavailableError(
                f"lora adapter '{name}' is still being loaded on this server; try again later"
            )
        assert record is not None, f"{name} failed, and stands for nothing"
        found = f", found {failure.found_digest[:12]}" if failure.found_digest else ""
        return AdapterUnavailableError(
            f"lora adapter '{name}' is not served by this server: this server failed to load the "
            f"version that its catalog names (digest {record.digest[:12]}{found}, serial "
            f"{record.serial}): {failure.told}; another one may have it, and this one tries again"
        )

    def _not_asked(self) -> CatalogUnavailableError:
        if self._replaced_by is not None:
            return CatalogUnavailableError(
                f"another server has registered as replica '{self.member.replica_id}' since; give "
                "each a --lora-replica-id of its own"
            )
        return CatalogUnavailableError(  # its place is for the log, which `_note_store` tells
            "the catalog has not told this server yet which adapters there are; try again later"
        )

    async def rolled_out(self, record: Record, seconds: float) -> Rollout:
        """How far a change has come when no replica is waited for any more, or time is over.

        Raises:
            CatalogUnavailableError: the store was lost; the change itself may go on.
        """
        return await self._rollouts.rolled_out(record, seconds)

    # ── the store ───────────────────────────────────────────────────────────────────────────

    async def _ask(self, call: Callable[..., Any], *arguments: object) -> Any:
        """Call a method of the store in a thread, which is left alone if it takes too long.

        Raises:
            CatalogUnavailableError: as the method does, or because it has not ended.
        """
        running = asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        try:
            async with asyncio.timeout(STORE_SECONDS):
                return await running
        except TimeoutError:
            raise CatalogUnavailableError(
                f"the catalog at {self._store.where}: no whole answer within {STORE_SECONDS:g} s"
            ) from None

    async def _stay_awake(self) -> None:
        while True:
            self.view.note_awake(self._clock())
            await asyncio.sleep(AWAKE_SECONDS)

    async def _keep(self) -> None:
        """Say what has been done whenever that changes, and that the replica is there."""
        while True:
            self._has_news.clear()
            pause = RENEW_SECONDS
            try:
                await self._renew()
                self._note_store(None)
            except CatalogUnavailableError as error:
                self._note_store(error)
                pause = RETRY_STORE_SECONDS
                self._has_news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._has_news.wait()

    async def _renew(self) -> None:
        is_back = not (self.view.is_current and self.is_store_up)
        if is_back and self._replaced_by is None:
            await self._catch_up()
        report: Report = self.view.report()
        registered: Member | None = await self._ask(self._store.renew, self.member, report)
        if registered == self.member:
            return
        self.view.must_ask()
        if registered is None:
            self._has_news.set()
        else:
            self._note_replaced(registered)

    async def _catch_up(self) -> None:
        """Take in everything at once, and register where the store does not know this process."""
        async with self._asking:
            self._num_asks += 1
            await self._ask(self._store.restore, self.view.snapshot())
            while True:
                snapshot: Snapshot = await self._ask(self._store.snapshot)
                if self.view.take_snapshot(snapshot):
                    break
                member = snapshot.member(self.member.replica_id)
                if member is not None and self._has_joined:
                    self._note_replaced(member)
                    return
                await self._ask(self._store.join, self.member)
                self._has_joined = True
        self._is_current.set()
        self._work.more()
        for name in [*self._changed]:
            self._tell(name)

    def _note_replaced(self, member: Member) -> None:
        if self._replaced_by is None:
            self._replaced_by = member
            logger.error("%s", self._not_asked())

    async def _follow(self) -> None:
        while True:
            if not self.view.is_current:
                self._is_current.clear()
                self._has_news.set()
                await self._is_current.wait()
            since, num_asks = self.view.serial, self._num_asks
            try:
                changes = await self._ask(self._store.changes, since, WATCH_SECONDS)
                if num_asks == self._num_asks:  # else it may have been of a store that is gone
                    await self._take_changes(changes)
            except CatalogUnavailableError as error:
                self._note_store(error)
                self._has_news.set()
                await asyncio.sleep(RETRY_STORE_SECONDS)

    async def _take_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if not self.view.take_change(change):
                await self._catch_up()
                break
            if change.record is not None:
                self._tell(change.record.name)
        if changes:
            self._work.more()
            self._has_news.set()

    def _note_store(self, error: CatalogUnavailableError | None) -> None:
        """Write a line when the store is lost, one if that stops requests, one when it is back."""
        if error is None and not self.is_store_up:
            logger.info(
                "the catalog at %s answers, and has %d adapters",
                self._store.where,
                sum(1 for _ in self.view.records()),
            )
        effect = ""
        if error is not None:
            effect = REQUESTS_GO_ON if self.view.is_current else REQUESTS_STOP
            if effect != self._told_effect:
                logger.warning("%s; %s until it answers", error, effect)
        self._told_effect = effect
        self.is_store_up = error is None

    def _note_change(self, name: str) -> None:
        self._has_news.set()
        self._tell(name)

    def _tell(self, name: str) -> None:
        """Wake those who wait for this name."""
        changed = self._changed.pop(name, None)
        if changed is not None:
            changed.set()


async def _kept_up(run: Callable[[], Awaitable[None]]) -> None:
    """Begin it again where a bug of ours ends it: without it, all others would wait for ever."""
    while True:
        try:
            await run()
        except Exception:
            logger.exception("the catalog is followed anew")
        await asyncio.sleep(RETRY_STORE_SECONDS)
