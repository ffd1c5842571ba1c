"""Finds adapters that are asked for and not loaded, by their names, where --lora-resolver says.

However many requests ask for an unknown name, one lookup runs. What was not found, or cannot be
served, is remembered for a short while and for a bounded number of names, so that a client that
asks for anything costs little. Knows names and places; files are read by who `load`s.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

from lora_serve.config import LoRAConfig
from lora_serve.config.lora import DIRECTORY, HUB
from lora_serve.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoraServeError,
)

logger = logging.getLogger(__name__)

REMEMBERED_SECONDS = 10.0
MAX_REMEMBERED = 4096
MAX_LOOKUPS = 64
MAX_NAME_CHARS = 256

Load = Callable[[str, str], Awaitable[object]]  # a name and its source; raises AdapterError


class AdapterResolver:
    """load: lets a name stand for what lies at a source, unless it stands for something already."""

    def __init__(
        self, config: LoRAConfig, load: Load, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._load = load
        self._clock = clock
        self._lookups: dict[str, asyncio.Task[bool]] = {}
        self._remembered: OrderedDict[str, tuple[float, LoraServeError | None]] = OrderedDict()

    async def resolve(self, name: str) -> bool:
        """Load the adapter of this name; False if it is nowhere.

        Raises:
            AdapterError: it was found, and cannot be served.
            AdapterUnavailableError: too much is being looked for, or a place does not answer.
        """
        until, error = self._remembered.get(name, (0.0, None))
        if self._clock() < until:
            if error is not None:
                raise error
            return False
        lookup = self._lookups.get(name)
        if lookup is None:
            sources = sources_of(name, self._config)
            if not sources:
                return False
            if len(self._lookups) >= MAX_LOOKUPS:
                raise AdapterUnavailableError(
                    f"lora adapter '{name}' is not loaded, and {MAX_LOOKUPS} others are being "
                    "looked for; try again later"
                )
            lookup = asyncio.create_task(self._look(name, sources), name="adapter-lookup")
            self._lookups[name] = lookup
            lookup.add_done_callback(partial(self._end, name))
        return await asyncio.shield(lookup)  # it goes on for others when one of them leaves

    def _end(self, name: str, lookup: asyncio.Task[bool]) -> None:
        del self._lookups[name]
        if not lookup.cancelled():
            lookup.exception()  # those who still wait for it are told

    async def _look(self, name: str, sources: list[str]) -> bool:
        error: LoraServeError | None = None
        for source in sources:
            try:
                await self._load(name, source)
            except AdapterNotFoundError:
                continue
            except AdapterExistsError:  # loaded by a call meanwhile
                return True
            except AdapterUnavailableError as unavailable:
                logger.warning("lora adapter '%s' from %s: %s", name, source, unavailable)
                error = AdapterUnavailableError(
                    f"lora adapter '{name}' could not be read; try again later"
                )
                break
            except AdapterError as refusal:
                logger.warning("lora adapter '%s' from %s: %s", name, source, refusal)
                error = AdapterError(
                    f"lora adapter '{name}' was found, and cannot be served: the server's log says "
                    "why",
                    "model",
                )
                break
            return True
        self._remember(name, error)
        if error is not None:
            raise error
        return False

    def _remember(self, name: str, error: LoraServeError | None) -> None:
        self._remembered[name] = self._clock() + REMEMBERED_SECONDS, error
        self._remembered.move_to_end(name)
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def sources_of(name: str, config: LoRAConfig) -> list[str]:
    """Where an adapter of this name may lie, in the order of --lora-resolver."""
    is_path = _is_safe(name)
    sources = []
    for place in config.lora_resolver:
        if place == HUB:
            from lora_serve.adapters.location import is_hub_id  # the engine's; not for others

            sources += [name] if is_hub_id(name) else []
        elif is_path and place.startswith(DIRECTORY):
            directory = os.path.expanduser(place.removeprefix(DIRECTORY))
            sources.append(os.path.join(os.path.abspath(directory), name))
        elif is_path:
            sources.append(f"{place.rstrip('/')}/{name}")
    return sources


def _is_safe(name: str) -> bool:
    """Whether a name, put behind a directory, stays below it by its letters alone."""
    parts = name.split("/")
    return (
        len(name) <= MAX_NAME_CHARS
        and name.isprintable()
        and "\\" not in name
        and all(part.strip(".") and not part.startswith("~") for part in parts)
    )
