"""Adapters' names that a catalog holds: a change here is written there, and all servers follow."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from lora_serve.catalog import plan
from lora_serve.catalog.changes import MAX_TRIES
from lora_serve.catalog.opening import open_store
from lora_serve.catalog.records import Member, Record, Standing
from lora_serve.catalog.replica import CatalogReplica
from lora_serve.catalog.rollout import Rollout, rollout_of
from lora_serve.config import CatalogConfig
from lora_serve.engine.frontend.resolver import AdapterResolver
from lora_serve.errors import (
    AdapterError,
    CatalogUnavailableError,
    ChangeUnknownError,
)
from lora_serve.identity import BASE_MODEL, EVERYTHING, Everything, NoAdapter
from lora_serve.messages import AdapterInfo
from lora_serve.observability.log import quoted
from lora_serve.observability.metrics import CatalogFigures
from lora_serve.server.adapter_names.base import Loaded, NotServed
from lora_serve.server.admin.adapter_changes import MAX_CHANGES, AdapterChanges
from lora_serve.server.admin.answers import AdapterChange
from lora_serve.server.admin.protocol import AdapterWish
from lora_serve.server.engine_api import Engine
from lora_serve.server.openai.models import ServedModels

logger = logging.getLogger(__name__)

NOT_KNOWN = "not known until the catalog answers"

_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})$")  # in the hub's cache


class CataloguedNames:
    """Names that a catalog holds. Changes go through it, also on this server."""

    is_shared = True

    def __init__(self, engine: Engine, config: CatalogConfig, member: Member) -> None:
        """Raises ConfigError: there can be no such catalog here."""
        self.changes = AdapterChanges()
        self._engine = engine
        self.replica_id = member.replica_id
        self._resolver = AdapterResolver(engine.config.lora, self._load_resolved)
        self._rollout_seconds = config.lora_rollout_timeout
        store = open_store(config)
        self.catalog = f"{store.where}, as replica {member.replica_id!r}"
        check_name = ServedModels(engine.config).check_adapter_name
        self.replica = CatalogReplica(
            store, engine, member, applied=self._applied, check_name=check_name
        )
        self._unknown: deque[float] = deque(maxlen=MAX_CHANGES)  # times of changes that may be made
        engine.metrics.watch_catalog(self._figures)

    @property
    def loaded(self) -> str:
        view = self.replica.view
        if not view.is_current:
            return NOT_KNOWN
        count, num_loaded = sum(1 for _ in view.records()), len(view.ready())
        if num_loaded < count:
            return f"{count} in the catalog, of which {num_loaded} are loaded so far"
        return f"{count} loaded" if count else ""

    @property
    def unable(self) -> Collection[str]:
        return self.replica.view.failed.keys()

    def not_served(self) -> Iterator[NotServed]:
        view = self.replica.view
        for record in view.records():
            name = record.name
            if self._engine.adapter(name) is None:
                yield NotServed(record, view.failure(name), self.replica.refusal(name))

    def check_ready(self) -> None:
        self.replica.check_ready()

    async def admit(self, name: str | NoAdapter) -> None:
        if name is BASE_MODEL or await self.replica.admit(name):
            return
        if await self._resolver.resolve(name):
            await self.replica.admit(name)

    async def load(self, wish: AdapterWish, by: str) -> Loaded:
        self.check_ready()
        record, adapter = await self._write_load(wish, by)
        adapter = replace(adapter, generation=record.generation, pinned=record.pinned)
        return Loaded(adapter, await self._rolled_out(record))

    async def _write_load(self, wish: AdapterWish, by: str) -> tuple[Record, AdapterInfo]:
        """Read the adapter, so that nothing changes where it cannot be, and write its record."""
        name = wish.lora_name
        if not wish.load_inplace and (current := self.replica.view.record(name)) is not None:
            plan.loading(current, load_inplace=False)(current)  # refuses before anything is read
        record, adapter = await self._read(wish, by)
        change = plan.loading(record, load_inplace=wish.load_inplace)
        return await self._change(record, change), adapter

    async def _read(self, wish: AdapterWish, by: str) -> tuple[Record, AdapterInfo]:
        """What the name is to stand for, by what lies at the wish's path."""
        name = wish.lora_name
        adapter = await self._engine.examine_lora_adapter(name, wish.lora_path, wish.digest)
        record = replace(
            self._wish(name, by),
            digest=adapter.digest,
            source=_source(wish.lora_path, adapter.path),
            pinned=wish.pinned,
        )
        return record, adapter

    async def _load_resolved(self, name: str, source: str) -> None:
        try:
            record, _ = await self._write_load(AdapterWish(name, source), "--lora-resolver")
        except CatalogUnavailableError as error:  # whose place is for the log
            logger.warning("adapter %s was not resolved: %s", quoted(name), error)
            raise CatalogUnavailableError(
                "the catalog cannot take up this adapter now; try again later"
            ) from error
        await self.replica.wait_until_known(record)

    async def unload(self, name: str, by: str) -> Rollout | None:
        wish = self._wish(name, by)
        return await self._rolled_out(await self._change(wish, plan.unloading(wish)))

    async def reset(self, name: str | Everything, by: str) -> bool:
        if name is EVERYTHING:
            await self._engine.reset_prefix_cache(name)
            return True
        record = await self.replica.changes.make(name, plan.resetting(self._wish(name, by)))
        return (await self._rolled_out(record)).is_everywhere

    async def rollouts(self, names: Sequence[str]) -> dict[str, Rollout]:
        standings = await self.replica.changes.standings()
        records = {name: self.replica.view.record(name) for name in names}
        return {n: rollout_of(one, standings) for n, one in records.items() if one is not None}

    async def standings(self) -> Sequence[Standing]:
        return await self.replica.changes.standings()

    async def forget(self, replica_id: str, *, has_ended: bool = False) -> None:
        await self.replica.changes.forget(replica_id, has_ended=has_ended)

    async def load_modules(self, modules: Sequence[tuple[str, str]]) -> None:
        """Load those of --lora-modules whose names the catalog does not know; else its word stays.

        Raises:
            AdapterError: one cannot be loaded. CatalogUnavailableError: the store was lost.
        """
        for name, path in modules:
            known = await self._module_record(name, path)
            await self.replica.wait_until_told(name)
            known = self.replica.view.last_record(name) or known
            if known.is_unloaded:
                logger.warning(
                    "--lora-modules %s=%s: this name was unloaded (serial %d, by %s at %s), and "
                    "stays so; load it again with `lora-serve adapters load`",
                    name,
                    path,
                    known.serial,
                    known.by or "nobody known",
                    known.replica or "no replica known",
                )
            elif known.source != path and not known.source.startswith(f"{path}@"):
                logger.warning(
                    "--lora-modules %s=%s: the catalog has this name from %s, which stays; "
                    "replace it with `lora-serve adapters replace`",
                    name,
                    path,
                    known.source,
                )

    async def _module_record(self, name: str, path: str) -> Record:
        """The record of a name of --lora-modules, which is loaded if the catalog does not know it.

        It is noted as such, so that an unload of it is remembered for servers that start later.
        """
        known = self.replica.view.last_record(name)
        for _ in range(MAX_TRIES):
            try:
                if known is None or plan.is_open_to_modules(known):
                    record, _ = await self._read(AdapterWish(name, path), "--lora-modules")
                    return await self._change(record, plan.loading_module(record))
                if known.is_module:
                    return known
                return await self.replica.changes.make(name, plan.naming_module(name))
            except plan.OtherStateError as error:  # another change came first
                known = error.found
        raise CatalogUnavailableError(
            f"the catalog has another record of '{name}' each time that --lora-modules is to be "
            "noted there; see what else changes this name, or writes to the catalog"
        )

    async def _change(self, wish: Record, change: plan.Plan) -> Record:
        try:
            return await self.replica.changes.make(wish.name, change)
        except ChangeUnknownError:
            self._unknown.append(wish.time)
            raise

    async def _rolled_out(self, record: Record) -> Rollout:
        try:
            rollout = await self.replica.rolled_out(record, self._rollout_seconds)
        except CatalogUnavailableError as error:
            raise ChangeUnknownError(
                f"{error}; '{record.name}' was changed (serial {record.serial}), but which servers "
                "have done so is not known: /v1/models tells when the catalog answers",
                record.digest,
            ) from error
        if not rollout.is_everywhere:
            logger.warning(
                "adapter %s of the catalog: serial %d is %s", record.name, record.serial, rollout
            )
        return rollout

    def _wish(self, name: str, by: str) -> Record:
        return Record(name=name, by=by, replica=self.replica.member.replica_id, time=time.time())

    def _figures(self) -> CatalogFigures:
        report = self.replica.view.report()
        counts = {
            "ready": len(self.replica.view.ready()),
            "loading": len(report.loading),
            "failed": len(report.failed),
        }
        return CatalogFigures(self.replica.is_store_up, report.serial, counts)

    def _applied(self, record: Record, before: Record | None) -> None:
        """Keep what others changed beside what was asked for here, which its call has kept.

        Unless that could not know whether it was made: now it is.
        """
        if record.replica == self.replica.member.replica_id:
            if record.time not in self._unknown:
                return
            self._unknown.remove(record.time)
        self.changes.add(
            AdapterChange(
                time=record.time,
                change="unload" if record.is_unloaded else "load",
                by=f"{record.by} at {record.replica}",
                lora_name=record.name,
                old_path=before.source if before else None,
                old_digest=before.digest if before else None,
                new_path=record.source or None,
                new_digest=record.digest or None,
                error=None,
                serial=record.serial,
            )
        )


def _source(asked: str, found: str) -> str:
    """What all servers are to read: of the hub the very revision that was found."""
    revision = _SNAPSHOT.search(found)
    is_hub = revision is not None and not os.path.isdir(os.path.expanduser(asked))
    return f"{asked}@{revision[1]}" if is_hub and revision and "@" not in asked else asked


def no_bodies() -> AdapterError:
    """The refusal of an adapter that came in a body."""
    return AdapterError(
        "an adapter that comes in a body has files on this server alone, which others of its "
        "--lora-catalog cannot read; write it to where all of them read, and load it from there"
    )
