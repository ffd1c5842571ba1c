"""Has the engine do what the catalog asks for, and tells the view what came of it.

A name that the engine cannot have as its record says is taken from it, so that no request gets what
it had before, and is tried again later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lora_serve.catalog.records import Failure, Record
from lora_serve.catalog.view import CatalogView, Work
from lora_serve.errors import (
    AdapterChangedError,
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    EngineDeadError,
    LoraServeError,
    NotForgottenError,
)
from lora_serve.messages import AdapterInfo
from lora_serve.observability.log import cut

logger = logging.getLogger(__name__)

NUM_WORKS = 4  # under way at once: as many as an engine reads
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # of what the engine could not have
MAX_DOUBLINGS = 16  # of the first; floats end before the failures do
ENGINE_RETRY_SECONDS = 0.5

_IN_LOG = "its log says why"
# To all callers, without paths and without words of the files, which may be another tenant's.
_TOLD: Mapping[type[LoraServeError], str] = {
    AdapterChangedError: "other bytes lie where the catalog says",
    AdapterNotFoundError: "no adapter lies where the catalog says",
    AdapterUnavailableError: "its files cannot be read at present",
    AdapterFormatError: "its copy of the adapter cannot be served, and its log says why",
}

Applied = Callable[[Record, Record | None], None]
CheckName = Callable[[str], None]


class Engine(Protocol):
    """What is asked of an engine; see AsyncEngine for what each of these promises."""

    async def load_lora_adapter(
        self,
        name: str,
        path: str,
        load_inplace: bool = False,
        pinned: bool = False,
        digest: str = "",
        generation: int = 0,
    ) -> AdapterInfo: ...

    async def unload_lora_adapter(self, name: str) -> None: ...

    async def reset_prefix_cache(self, lora_name: str, generation: int = 0) -> None: ...


@dataclass(slots=True)
class _Failing:
    """A name that the engine cannot have since the change `serial`, and when it is tried again."""

    serial: int
    reason: str = ""
    num_failures: int = 0
    timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class EngineWork:
    """Call `more` whenever the view may have work. told: is called with each name that changed.

    applied: is told each record that the engine has come to have, with what it had before.
    check_name: raises AdapterError for names that no adapter can have on this server.
    """

    def __init__(
        self,
        view: CatalogView,
        engine: Engine,
        applied: Applied,
        told: Callable[[str], None],
        check_name: CheckName,
    ) -> None:
        self._view = view
        self._engine = engine
        self._applied = applied
        self._told = told
        self._check_name = check_name
        self._works: set[asyncio.Task[None]] = set()
        self._failing: dict[str, _Failing] = {}
        self._is_closed = False

    def more(self) -> None:
        """Begin what there is to do, as far as it may be under way at once."""
        if self._is_closed:
            return
        for work in self._view.take_work(NUM_WORKS):
            task = asyncio.create_task(self._do(work), name="catalog-work")
            self._works.add(task)
            task.add_done_callback(self._works.discard)

    async def close(self) -> None:
        """Leave what is under way to the engine, and begin nothing more."""
        self._is_closed = True
        works = [*self._works]
        for task in works:
            task.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        for name in [*self._failing]:
            self._forget_failures(name)

    async def _do(self, work: Work) -> None:
        """Have the engine publish a record, or give up the name."""
        record = work.record
        try:
            await self._publish(work)
        except LoraServeError as error:
            await self._give_up(record, error)
        except Exception:  # a bug of ours: the name must not seem to be under way for ever
            logger.exception("adapter %s of the catalog could not be applied", cut(record.name))
            await self._give_up(record, LoraServeError("the server failed; its log says why"))
        else:
            self._forget_failures(record.name)
            self._view.note_done(record)
            logger.info(
                "adapter %s of the catalog: serial %d by %s at %s, %s",
                cut(record.name),
                record.serial,
                record.by or "nobody known",
                record.replica or "no replica known",
                "unloaded" if record.is_unloaded else f"digest {record.digest[:12]}",
            )
            self._applied(record, work.before)
        finally:
            self._told(record.name)
            self.more()

    async def _publish(self, work: Work) -> None:
        record, before = work.record, work.before
        while True:
            try:
                if record.is_unloaded:
                    if before is not None:
                        await self._engine.unload_lora_adapter(record.name)
                elif before is not None and record.differs_in_generation_alone(before):
                    await self._engine.reset_prefix_cache(record.name, record.generation)
                else:
                    self._check_name(record.name)
                    await self._engine.load_lora_adapter(
                        record.name,
                        record.source,
                        load_inplace=True,
                        pinned=record.pinned,
                        digest=record.digest,
                        generation=record.generation,
                    )
            except NotForgottenError:  # by a tier; but its generation leads to none of it
                return
            except EngineDeadError:  # the next engine has what this one had
                await asyncio.sleep(ENGINE_RETRY_SECONDS)
            else:
                return

    async def _give_up(self, record: Record, error: LoraServeError) -> None:
        """Take the name from the engine, so that no request gets what it had before."""
        while True:
            try:
                await self._engine.unload_lora_adapter(record.name)
            except EngineDeadError:
                await asyncio.sleep(ENGINE_RETRY_SECONDS)
                continue
            except LoraServeError:  # it has no version of it
                pass
            break
        found = error.found_digest if isinstance(error, AdapterChangedError) else ""
        told = next((told for kind, told in _TOLD.items() if isinstance(error, kind)), _IN_LOG)
        self._view.note_failed(record, Failure(record.serial, str(error), found, told))
        self._try_again_later(record, str(error))

    def _try_again_later(self, record: Record, reason: str) -> None:
        """Set the name's only timer. The log has each reason once, not once for each retry."""
        name = record.name
        failing = self._failing.get(name)
        if failing is None or failing.serial != record.serial:
            self._forget_failures(name)
            failing = self._failing[name] = _Failing(record.serial)
        failing.cancel()
        if failing.reason != reason:
            logger.warning(
                "adapter %s of the catalog (serial %d) takes no requests here: %s",
                cut(name),
                record.serial,
                reason,
            )
        failing.reason = reason
        seconds = RETRY_SECONDS * 2 ** min(failing.num_failures, MAX_DOUBLINGS)
        failing.num_failures += 1
        loop = asyncio.get_running_loop()
        failing.timer = loop.call_later(min(seconds, MAX_RETRY_SECONDS), self._retry, name)

    def _forget_failures(self, name: str) -> None:
        failing = self._failing.pop(name, None)
        if failing is not None:
            failing.cancel()

    def _retry(self, name: str) -> None:
        if name not in self._view.failed:  # the catalog has changed it since
            self._forget_failures(name)
        self._view.retry(name)
        self.more()
