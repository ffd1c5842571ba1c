"""What a replica reports to routers, as Ray Serve carries it: plain JSON values.

A report is as large as what the replica holds in memory and, up to a bound, what it cannot have; it
is never as large as all adapters.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import TypedDict

from lora_serve.errors import LoraServeError
from lora_serve.fleet.replicas import ReplicaReport
from lora_serve.server.engine_api import Engine

MAX_LISTING_SHARE = 0.01  # of the time, for the listing of adapters: there may be many
MAX_NAMES = 2**16
MAX_UNABLE = 2**12  # names of a report; requests for others may come here, and must go on


class Stats(TypedDict, total=False):
    """versions: of the adapters in memory, by name. on_device: those that a step holds.

    unable: names that the replica refuses, because it cannot have what they stand for; None for all
    of them, because it does not know what they stand for.
    """

    versions: dict[str, str]
    on_device: list[str]
    unable: list[str] | None
    num_running: int
    num_waiting: int
    is_draining: bool


def report_of(stats: Mapping[str, object]) -> ReplicaReport:
    """The report that `stats` stand for; a replica that has not reported yet is idle."""
    known: Stats = {**stats}  # type: ignore[typeddict-item]  # as `Reporter` has made them
    on_device = frozenset(known.get("on_device", ()))
    unable = known.get("unable", ())
    return ReplicaReport(
        on_device=on_device,
        in_memory=frozenset(known.get("versions", ())) - on_device,
        unable=None if unable is None else frozenset(unable),
        num_running=known.get("num_running", 0),
        num_waiting=known.get("num_waiting", 0),
        is_draining=known.get("is_draining", False),
    )


class Reporter:
    """Makes the reports of one replica. unable: the names that it refuses now; None for all."""

    def __init__(
        self,
        engine: Engine,
        unable: Callable[[], Collection[str] | None] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._unable = unable
        self._clock = clock
        self._versions: dict[str, str] = {}
        self._next_listing = 0.0

    async def stats(self) -> Stats:
        """The replica as it is; with its engine gone it takes no requests, but is there."""
        try:
            self._engine.check_health()
            await self._list_adapters()
            now = await self._engine.get_stats()
        except LoraServeError:
            return {"is_draining": True}
        unable = self._unable()
        return {
            "versions": self._versions,
            "on_device": [*now.running_adapters],
            "unable": None if unable is None else [*islice(unable, MAX_UNABLE)],
            "num_running": now.num_running,
            "num_waiting": now.num_waiting,
        }

    async def _list_adapters(self) -> None:
        begun = self._clock()
        if begun < self._next_listing or not self._engine.config.lora.enable_lora:
            return
        self._versions = {
            adapter.name: f"{adapter.digest[:16]}-{adapter.generation}"
            for adapter in await self._engine.list_adapters()
            if adapter.is_resident
        }
        ended = self._clock()
        self._next_listing = ended + (ended - begun) / MAX_LISTING_SHARE


class Versions:
    """Which version each name was reported with last, for as many names as are remembered."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._versions: OrderedDict[str, str] = OrderedDict()

    def replaced(self, stats: Mapping[str, object]) -> list[str]:
        """The names that stand for something else than in the reports before."""
        reported = stats.get("versions", {})
        assert isinstance(reported, dict), reported
        changed = []
        for name, version in reported.items():
            if self._versions.get(name, version) != version:
                changed.append(name)
            self._versions[name] = version
            self._versions.move_to_end(name)
        while len(self._versions) > self._max_names:
            self._versions.popitem(last=False)
        return changed
