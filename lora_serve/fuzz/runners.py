"""The servers that traces are run on: a new one for each trace, or one at a URL."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lora_serve.bench.http_stream import HttpFault, Origin
from lora_serve.demo.server_process import ServerDiedError, ServerProcess
from lora_serve.fuzz.client import FuzzClient
from lora_serve.fuzz.flags import SERVED_MODEL, WORKSPACE
from lora_serve.fuzz.player import RESTARTS, Player, Record, ServerUnderTest, check_playable
from lora_serve.fuzz.trace import API_KEYS, Kill, Trace, Unload

SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.05
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
RAM_BYTES = 2 * 2**20  # small, so that blocks leave it for the next tier
DISK_BYTES = 4 * 2**20


@dataclass(slots=True)
class TraceRun:
    """What came of playing a trace once.

    records: one for each event, if the trace came to its end. metrics: of the server, at the end.
    troubles: what is wrong with the server itself.
    """

    records: list[Record] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)


class TraceRunner(Protocol):
    def play(self, trace: Trace) -> TraceRun: ...


# How a server of a trace is told to use each tier that traces can draw: its place, and --redis-url.
TIER_FLAGS: Mapping[str, Callable[[Path, str | None], list[str]]] = {
    "ram": lambda place, url: ["--kv-ram-bytes", str(RAM_BYTES)],
    "disk": lambda place, url: [
        *("--kv-disk-path", str(place / "kv"), "--kv-disk-bytes", str(DISK_BYTES))
    ],
    "redis": lambda place, url: ["--kv-redis-url", url] if url else [],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshServers:
    """Starts a new server for every trace, so that a trace alone decides how it goes.

    flags: the user's, which stand after the trace's. workspace: what servers keep from one trace
    to the next.
    """

    model: Path
    base_model: str
    flags: Sequence[str]
    versions: Sequence[Path]
    hidden_size: int
    workspace: Path
    redis_url: str | None = None

    def play(self, trace: Trace) -> TraceRun:
        with tempfile.TemporaryDirectory(prefix="lora-serve-fuzz-") as name:
            place = Path(name)
            drawn = (
                flag.replace(WORKSPACE, str(self.workspace)).replace(SERVED_MODEL, str(self.model))
                for flag in trace.flags
            )
            flags = (*drawn, *self._tier_flags(trace, place), *self.flags)
            with ServerProcess(self.model, flags, place / "log") as server:
                try:
                    server.wait_until_healthy()
                except ServerDiedError as error:
                    return TraceRun(troubles=[str(error)])
                under_test = self._under_test(server, place, trace)
                check_playable(trace, under_test)
                num_kills = sum(isinstance(event, Kill) for event in trace.events)
                run = asyncio.run(_play(under_test, trace, num_kills))
                if run.troubles:
                    run.troubles.append(server.last_log_lines())
                return run

    def _under_test(self, server: ServerProcess, place: Path, trace: Trace) -> ServerUnderTest:
        return ServerUnderTest(
            client=FuzzClient(Origin.parse(server.base_url), API_KEYS),
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
        for tier in trace.tiers:
            flags += TIER_FLAGS[tier](place, self.redis_url)
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """Plays all traces on one server at a URL; names and salts are new each time."""

    url: str
    api_key: str | None
    base_model: str
    versions: Sequence[Path]
    hidden_size: int

    def play(self, trace: Trace) -> TraceRun:
        with tempfile.TemporaryDirectory(prefix="lora-serve-fuzz-") as name:
            server = ServerUnderTest(
                client=FuzzClient(Origin.parse(self.url), (self.api_key,) if self.api_key else ()),
                base_model=self.base_model,
                hidden_size=self.hidden_size,
                versions=self.versions,
                workspace=Path(name),
                prefix=f"{secrets.token_hex(4)}-",
            )
            check_playable(trace, server)
            return asyncio.run(self._play(server, trace))

    async def _play(self, server: ServerUnderTest, trace: Trace) -> TraceRun:
        before = await server.client.metrics()
        run = await _play(server, trace, num_kills=int(before.get(RESTARTS, 0)))
        run.metrics = {name: value - before.get(name, 0.0) for name, value in run.metrics.items()}
        names = {load.lora_name for load in trace.loads}
        unloads = tuple(Unload(lora_name=name) for name in sorted(names))
        await Player(server).play(Trace(seed=trace.seed, events=unloads))  # some are gone already
        return run


async def _play(server: ServerUnderTest, trace: Trace, num_kills: int) -> TraceRun:
    run = TraceRun(await Player(server).play(trace))
    try:
        run.metrics = await _settled_metrics(server.client)
    except HttpFault as error:
        run.troubles.append(f"the server does not report its metrics any more: {error}")
        return run
    held = {name: run.metrics.get(name, 0.0) for name in RUNNING}
    if any(held.values()):
        run.troubles.append(f"all have left, but {held} after {SETTLE_SECONDS:.0f} s")
    num_restarts = int(run.metrics.get(RESTARTS, 0))
    if num_restarts > num_kills:
        run.troubles.append(f"{num_restarts} engines died, {num_kills} were killed")
    return run


async def _settled_metrics(client: FuzzClient) -> dict[str, float]:
    """The metrics, once nothing runs or holds blocks; or after SETTLE_SECONDS, as they are."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics = await client.metrics()
        is_settled = not any(metrics.get(name, 0.0) for name in RUNNING)
        if is_settled or time.monotonic() > deadline:
            return metrics
        await asyncio.sleep(POLL_SECONDS)
