"""Has the engine do what the catalog asks for, and tells the view what came of it.

A name that the engine cannot have as its record says is taken from it, so that no request gets what
it had before, and is tried again later.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
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

logger = logging.getLogger(__name__)

NUM_WORKS = 4  # under way at once: as many as an engine reads
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # of what the engine could not have
ENGINE_RETRY_SECONDS = 0.5

_PATH = re.compile(r"(?<![\w.])~?/\w")  # an absolute one, or one of a home
_IN_LOG = "its log says why"
_TOLD: Mapping[type[LoraServeError], str] = {
    AdapterChangedError: "other bytes lie where the catalog says",
    AdapterNotFoundError: "no adapter lies where the catalog says",
    AdapterUnavailableError: "its files cannot be read at present",
}

Applied = Callable[[Record, Record | None], None]


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

    async def reset_prefix_cache(self, lora_name: str, generation: int = 0) -> bool: ...


class EngineWork:
    """Call `more` whenever the view may have work. told: is called with each name that changed.

    applied: is told each record that the engine has come to have, with what it had before.
    """

    def __init__(
        self, view: CatalogView, engine: Engine, applied: Applied, told: Callable[[str], None]
    ) -> None:
        self._view = view
        self._engine = engine
        self._applied = applied
        self._told = told
        self._works: set[asyncio.Task[None]] = set()
        self._num_failures: dict[str, int] = {}
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

    async def _do(self, work: Work) -> None:
        """Have the engine publish a record, or give up the name."""
        record = work.record
        try:
            await self._publish(work)
        except LoraServeError as error:
            await self._give_up(record, error)
        except Exception:  # a bug of ours: the name must not seem to be under way for ever
            logger.exception("adapter %s of the catalog could not be applied", record.name)
            await self._give_up(record, LoraServeError("the server failed; its log says why"))
        else:
            self._num_failures.pop(record.name, None)
            self._view.note_done(record)
            logger.info(
                "adapter %s of the catalog: serial %d by %s at %s, %s",
                record.name,
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
        num_failures = self._num_failures[record.name] = self._num_failures.get(record.name, 0) + 1
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
        failure = Failure(record.serial, str(error), found, _without_paths(error))
        self._view.note_failed(record, failure)
        if num_failures == 1:
            logger.warning(
                "adapter %s of the catalog (serial %d) takes no requests here: %s",
                record.name,
                record.serial,
                error,
            )
        seconds = min(RETRY_SECONDS * 2 ** (num_failures - 1), MAX_RETRY_SECONDS)
        asyncio.get_running_loop().call_later(seconds, self._retry, record.name)

    def _retry(self, name: str) -> None:
        self._view.retry(name)
        self.more()


def _without_paths(error: LoraServeError) -> str:
    """Why an adapter could not be loaded, for callers who are not to know where it lies."""
    if isinstance(error, AdapterFormatError):
        return "; ".join(one for one in error.findings if not _PATH.search(one)) or _IN_LOG
    return next((told for kind, told in _TOLD.items() if isinstance(error, kind)), _IN_LOG)
