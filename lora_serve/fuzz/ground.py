"""The servers that traces are played on: a new one for each trace, or one at a URL."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lora_serve.bench.http_stream import HttpFault, Origin
from lora_serve.demo.server_process import ServerDiedError, ServerProcess
from lora_serve.fuzz.client import FuzzClient
from lora_serve.fuzz.player import RESTARTS, Player, Record, Stand, check_playable
from lora_serve.fuzz.trace import Kill, Load, Trace, Unload

SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.05
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
RAM_BYTES = 2 * 2**20  # small, so that blocks leave it for the next tier
DISK_BYTES = 4 * 2**20


@dataclass(slots=True)
class Played:
    """A trace as it was played.

    records: one for each event, if the trace came to its end. metrics: of the server, at the end.
    troubles: what is wrong with the server itself.
    """

    records: list[Record] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)


class Ground(Protocol):
    def play(self, trace: Trace) -> Played: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshServers:
    """A new server for every trace, so that a trace alone decides how it goes.

    flags: the user's, which stand after the trace's.
    """

    model: Path
    base_model: str
    flags: Sequence[str]
    versions: Sequence[Path]
    hidden_size: int
    redis_url: str | None = None

    def play(self, trace: Trace) -> Played:
        with tempfile.TemporaryDirectory(prefix="lora-serve-fuzz-") as name:
            place = Path(name)
            flags = (*trace.flags, *self._tier_flags(trace, place), *self.flags)
            with ServerProcess(self.model, flags, place / "log") as server:
                try:
                    server.wait_until_healthy()
                except ServerDiedError as error:
                    return Played(troubles=[str(error)])
                stand = self._stand(server, place, trace)
                check_playable(trace, stand)
                num_kills = sum(isinstance(event, Kill) for event in trace.events)
                played = asyncio.run(_play(stand, trace, num_kills))
                if played.troubles:
                    played.troubles.append(server.last_log_lines())
                return played

    def _stand(self, server: ServerProcess, place: Path, trace: Trace) -> Stand:
        return Stand(
            client=FuzzClient(Origin.parse(server.base_url)),
            base_model=self.base_model,
            hidden_size=self.hidden_size,
            versions=self.versions,
            workspace=place / "adapters",
            prefix=f"{secrets.token_hex(4)}-" if "redis" in trace.tiers else "",
            server_pid=server.pid,
            disk=place / "kv",
        )

    def _tier_flags(self, trace: Trace, place: Path) -> list[str]:
        flags: list[str] = []
        if "ram" in trace.tiers:
            flags += ["--kv-ram-bytes", str(RAM_BYTES)]
        if "disk" in trace.tiers:
            flags += ["--kv-disk-path", str(place / "kv"), "--kv-disk-bytes", str(DISK_BYTES)]
        if "redis" in trace.tiers and self.redis_url is not None:
            flags += ["--kv-redis-url", self.redis_url]
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """One server at a URL for all traces; names and salts are new each time."""

    url: str
    api_key: str | None
    base_model: str
    versions: Sequence[Path]
    hidden_size: int

    def play(self, trace: Trace) -> Played:
        with tempfile.TemporaryDirectory(prefix="lora-serve-fuzz-") as name:
            stand = Stand(
                client=FuzzClient(Origin.parse(self.url), self.api_key),
                base_model=self.base_model,
                hidden_size=self.hidden_size,
                versions=self.versions,
                workspace=Path(name),
                prefix=f"{secrets.token_hex(4)}-",
            )
            check_playable(trace, stand)
            return asyncio.run(self._play(stand, trace))

    async def _play(self, stand: Stand, trace: Trace) -> Played:
        before = await stand.client.metrics()
        played = await _play(stand, trace, num_kills=int(before.get(RESTARTS, 0)))
        played.metrics = {
            name: value - before.get(name, 0.0) for name, value in played.metrics.items()
        }
        names = {event.lora_name for event in trace.events if isinstance(event, Load)}
        unloads = tuple(Unload(lora_name=name) for name in sorted(names))
        await Player(stand).play(Trace(seed=trace.seed, events=unloads))  # some are gone already
        return played


async def _play(stand: Stand, trace: Trace, num_kills: int) -> Played:
    played = Played(await Player(stand).play(trace))
    try:
        played.metrics = await _settled_metrics(stand.client)
    except HttpFault as error:
        played.troubles.append(f"the server does not report its metrics any more: {error}")
        return played
    held = {name: played.metrics.get(name, 0.0) for name in RUNNING}
    if any(held.values()):
        played.troubles.append(f"all have left, but {held} after {SETTLE_SECONDS:.0f} s")
    num_restarts = int(played.metrics.get(RESTARTS, 0))
    if num_restarts > num_kills:
        played.troubles.append(f"{num_restarts} engines died, {num_kills} were killed")
    return played


async def _settled_metrics(client: FuzzClient) -> dict[str, float]:
    """The metrics, once nothing runs or holds blocks; or after SETTLE_SECONDS, as they are."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics = await client.metrics()
        is_settled = not any(metrics.get(name, 0.0) for name in RUNNING)
        if is_settled or time.monotonic() > deadline:
            return metrics
        await asyncio.sleep(POLL_SECONDS)
