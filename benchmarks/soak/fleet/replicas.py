"""The replicas that are asked, and killed: servers with one catalog, or those of `--replicas`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

import httpx

from benchmarks.common.processes import engine_pid
from benchmarks.soak.fleet.troubles import STORE, Troubles
from benchmarks.soak.fleet.versions import Version
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.processes import pids_below
from tests.fakes.redis_server import RedisServer

BASE = "base"
FLAGS = (
    *("--served-model-name", BASE, "--cpu-threads", "1", "--max-model-len", "256"),
    *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "64", "--max-lora-rank", "8"),
    *("--max-num-seqs", "16", "--num-gpu-blocks-override", "300"),
)  # fmt: skip
PATIENCE_SECONDS = 300.0  # others may use the machine, too
LOOK_SECONDS = 0.1
SILENT_SECONDS = 11.0  # after which a replica may be forgotten
REPLICA, ENGINE, CONTROLLER = b"ray::ServeReplica", b"spawn_main", b"ray::ServeController"

Fault = Callable[[Random], Coroutine[None, None, None]]


class Replicas(Protocol):
    @property
    def urls(self) -> Sequence[str]:
        """The addresses that requests go to."""

    @property
    def faults(self) -> Mapping[Fault, int]:
        """What may be done to them, by weight."""

    def process(self, url: str) -> str:
        """The very process that answers there; "" where several do."""

    async def start(self) -> None: ...

    def stop(self) -> None: ...


def flags_of(store: str, modules: Mapping[str, Version]) -> tuple[str, ...]:
    """What all replicas are started with, again after each kill. modules: by name."""
    named = [f"{name}={version.path}" for name, version in modules.items()]
    return (*FLAGS, "--lora-catalog", store, "--lora-modules", *named)


class Servers:
    """Servers of their own, each with an address."""

    def __init__(
        self, model: Path, count: int, flags: Sequence[str], directory: Path, troubles: Troubles
    ) -> None:
        self._model = model
        self._flags = flags
        self._directory = directory
        self._troubles = troubles
        self._servers: list[ServerProcess] = []
        self._num_started = 0
        self._count = count
        self._locks = [asyncio.Lock() for _ in range(count)]  # one fault of a server at a time
        self.urls: Sequence[str] = ()
        self.faults: Mapping[Fault, int] = {
            self._kill_server: 4,
            self._kill_engine: 2,
            self._stop_server: 2,
            self._forget_stopped_server: 1,
        }

    async def start(self) -> None:
        self._servers = [self._started(f"replica-{i}") for i in range(self._count)]
        self.urls = [server.base_url for server in self._servers]
        for url in self.urls:
            await until_healthy(url)

    def stop(self) -> None:
        for server in self._servers:
            server.begin_to_stop()
        for server in self._servers:
            server.stop()

    def process(self, url: str) -> str:
        return str(self._servers[self.urls.index(url)].pid)

    def _started(self, name: str, port: int = 0) -> ServerProcess:
        self._num_started += 1
        log = self._directory / f"{name}.{self._num_started}.log"
        flags = (*self._flags, "--lora-replica-id", name)
        return ServerProcess(self._model, flags, log, port=port)

    async def _kill_server(self, rng: Random) -> None:
        index = rng.randrange(self._count)
        async with self._locks[index]:
            server = self._servers[index]
            with self._troubles.of(server.base_url, "servers killed"):
                os.kill(server.pid, signal.SIGKILL)
                await asyncio.to_thread(server.wait)
                await asyncio.sleep(rng.choice((0.0, 3.0, SILENT_SECONDS)))
                self._servers[index] = self._started(f"replica-{index}", server.port)
                await until_healthy(server.base_url)

    async def _kill_engine(self, rng: Random) -> None:
        index = rng.randrange(self._count)
        async with self._locks[index]:
            server = self._servers[index]
            pid = engine_pid(server.pid)
            assert pid is not None, "it was healthy when the fault before had ended"
            with self._troubles.of(server.base_url, "engines killed"):
                os.kill(pid, signal.SIGKILL)
                while engine_pid(server.pid) in (None, pid):
                    await asyncio.sleep(LOOK_SECONDS)
                await until_healthy(server.base_url)

    async def _stop_server(self, rng: Random) -> None:
        await self._stopped(rng, rng.uniform(1.0, SILENT_SECONDS), is_forgotten=False)

    async def _forget_stopped_server(self, rng: Random) -> None:
        await self._stopped(rng, SILENT_SECONDS, is_forgotten=True)

    async def _stopped(self, rng: Random, seconds: float, *, is_forgotten: bool) -> None:
        index = rng.randrange(self._count)
        async with self._locks[index]:
            await self._stop_and_continue(index, seconds, is_forgotten=is_forgotten)

    async def _stop_and_continue(self, index: int, seconds: float, *, is_forgotten: bool) -> None:
        server, other = self._servers[index], self._servers[index - 1]
        what = "servers stopped and forgotten" if is_forgotten else "servers stopped"
        with self._troubles.of(server.base_url, what):
            os.kill(server.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
                if is_forgotten:
                    url = f"{other.base_url}/v1/replicas/replica-{index}"
                    # The store, or the other one, may be away: then it stays.
                    with contextlib.suppress(httpx.TransportError):
                        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
                            await client.delete(url)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await until_healthy(server.base_url)


class RayReplicas:
    """The replicas of one `lora-serve serve --replicas`, behind its address."""

    def __init__(
        self, model: Path, count: int, flags: Sequence[str], directory: Path, troubles: Troubles
    ) -> None:
        self._troubles = troubles
        self._count = count
        flags = (*flags, "--replicas", str(count))
        self._server = ServerProcess(model, flags, directory / "fleet.log")
        self.urls: Sequence[str] = [self._server.base_url]
        self.faults: Mapping[Fault, int] = {
            self._kill_replica: 4,
            self._kill_engine: 2,
            self._kill_controller: 1,
        }

    async def start(self) -> None:
        await asyncio.to_thread(self._server.wait_until_healthy)
        await self._until_there(REPLICA, ())

    def stop(self) -> None:
        self._server.stop()

    def process(self, url: str) -> str:
        return ""

    async def _kill_replica(self, rng: Random) -> None:
        await self._kill(REPLICA, "replicas killed", rng)

    async def _kill_engine(self, rng: Random) -> None:
        await self._kill(ENGINE, "engines killed", rng)

    async def _kill_controller(self, rng: Random) -> None:
        await self._kill(CONTROLLER, "Ray Serve's controllers killed", rng)

    async def _kill(self, kind: bytes, what: str, rng: Random) -> None:
        """No request may fail for it: only changes have trouble."""
        victim = rng.choice(pids_below(self._server.pid, kind))
        with self._troubles.of("a replica", what):
            os.kill(victim, signal.SIGKILL)
            await self._until_there(kind, (victim,))

    async def _until_there(self, kind: bytes, gone: Sequence[int]) -> None:
        """Wait until there are as many as there should be, and all replicas report."""
        count = 1 if kind == CONTROLLER else self._count
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                pids = pids_below(self._server.pid, kind)
                if (
                    len(pids) >= count
                    and not {*gone} & {*pids}
                    and await self._num_listed() >= (self._count)
                ):
                    return
                await asyncio.sleep(LOOK_SECONDS)

    async def _num_listed(self) -> int:
        """How many replicas are asked for their metrics."""
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            page = (await client.get(f"{self.urls[0]}/metrics")).text
        name = "vllm:num_requests_running{"
        return sum(line.startswith(name) for line in page.splitlines())


class Store:
    """The catalog's server, and what may be done to it. A killed one comes back empty."""

    def __init__(self, redis: RedisServer, replicas: Replicas, troubles: Troubles) -> None:
        self._redis = redis
        self._replicas = replicas
        self._troubles = troubles
        self._one_fault = asyncio.Lock()  # two drawn at once take turns: none has a dead one paused
        self.faults: Mapping[Fault, int] = {self._kill: 3, self._pause: 2}

    async def _kill(self, rng: Random) -> None:
        async with self._one_fault:
            with self._troubles.of(STORE, "stores killed"):
                await asyncio.to_thread(self._redis.kill)
                await asyncio.sleep(rng.choice((0.0, 1.0, 8.0)))
                await asyncio.to_thread(self._redis.start)
                await self._until_asked()

    async def _pause(self, rng: Random) -> None:
        async with self._one_fault:
            with self._troubles.of(STORE, "stores stopped"):
                self._redis.pause()
                await asyncio.sleep(rng.uniform(0.5, 8.0))
                self._redis.resume()
                await self._until_asked()

    async def _until_asked(self) -> None:
        """Wait until all that answer can ask it again."""
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            for url in self._replicas.urls:
                for _ in range(3):  # behind one address, another one each time
                    while not await _is_ok(client, f"{url}/v1/replicas"):
                        if self._troubles.met(url, now := time.monotonic(), now):
                            break  # that trouble ends when it is healthy
                        await asyncio.sleep(LOOK_SECONDS)


async def until_healthy(url: str) -> None:
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client,
    ):
        while not await _is_ok(client, f"{url}/health"):
            await asyncio.sleep(LOOK_SECONDS)


async def _is_ok(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False
