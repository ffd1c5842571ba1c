"""What a crowd costs in memory: `python -m benchmarks.speed.queue_memory queue|streams`.

On the demo's tiny model. queue: twice, 10,000 requests wait, each on a connection of its own; then
their clients leave. streams: 50 clients ask for long streams and read nothing until all of these
have been given up, and beside them 1,000 streams are open at once. The memory of both processes is
looked at each time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from benchmarks.common.facts import write_json
from benchmarks.common.processes import server_footprints
from benchmarks.soak.samples import read_metrics
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.machine import Machine, describe_machine
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import ServerProcess
from lora_serve.observability.table import text_table

FORMAT = "lora-serve/queue-memory/1"
PROMPT_TOKENS = 512
UNREAD_CHOICES = 4  # so many that the kernel's buffers are full before the answer ends
SMALL_BUFFER = 4096
AT_ONCE = 200  # connections that are being opened
SETTLE_SECONDS = 2.0
STREAM_FLAGS = (
    "--max-num-seqs",
    "1024",
    "--max-num-batched-tokens",
    "512",
    "--max-stream-backlog",
    "64",
)
QUEUE_FLAGS = ("--max-num-seqs", "2", "--max-num-queued-reqs", "-1")


@dataclass(frozen=True, slots=True)
class Moment:
    """num_requests: running or waiting then. Bytes are resident."""

    title: str
    num_requests: int
    api_bytes: int
    engine_bytes: int
    num_connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    machine: Machine
    prompt_tokens: int
    moments: list[Moment]


class Crowd:
    """Many clients of one server, and what they cost it."""

    def __init__(self, server: ServerProcess) -> None:
        self._pid = server.pid
        self._origin = Origin.parse(server.base_url)
        self._rng = Random(1)
        self._num_connections = 0
        self.moments: list[Moment] = []

    async def look(self, title: str) -> None:
        await asyncio.sleep(SETTLE_SECONDS)
        api, engine = server_footprints(self._pid)
        moment = Moment(title, await self.num_requests(), api.rss_bytes, engine.rss_bytes,
                        self._num_connections)  # fmt: skip
        self.moments.append(moment)
        print(f"{title}: {moment.num_requests:,} requests", flush=True)

    async def num_requests(self) -> int:
        metrics = await read_metrics(self._origin)
        return int(metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"])

    async def wait_until(self, holds: Callable[[int], bool]) -> None:
        """Until this is true of the number of requests."""
        while not holds(await self.num_requests()):
            await asyncio.sleep(0.2)

    @asynccontextmanager
    async def clients(self, bodies: Iterable[bytes], *, reading: bool) -> Iterator[None]:
        """Each has sent its body; they leave with the context."""
        async with AsyncExitStack() as all_of_them:
            turns = asyncio.Semaphore(AT_ONCE)

            async def come(body: bytes) -> None:
                async with turns:
                    await all_of_them.enter_async_context(self._client(body, reading))

            await asyncio.gather(*map(come, bodies))
            yield

    def bodies(self, count: int, **fields: object) -> Iterator[bytes]:
        """Each with a prompt of its own."""
        for _ in range(count):
            prompt = self._rng.choices(range(3, 700), k=PROMPT_TOKENS)
            body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
            yield json.dumps(body).encode()

    @asynccontextmanager
    async def _client(self, body: bytes, reading: bool) -> Iterator[None]:
        loop, client = asyncio.get_running_loop(), socket.socket()
        client.setblocking(False)
        if not reading:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        await loop.sock_connect(client, (self._origin.host, self._origin.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: crowd\r\nContent-Length: {len(body)}\r\n"
        await loop.sock_sendall(
            client, f"{head}Content-Type: application/json\r\n\r\n".encode() + body
        )
        reader = loop.create_task(_read(client)) if reading else None
        self._num_connections += 1
        try:
            yield
        finally:
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            self._num_connections -= 1
            client.close()


async def _read(client: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(client, 2**16):
        pass


async def measure_queue(crowd: Crowd, num_requests: int, num_rounds: int) -> None:
    """So many wait, and hardly any answer ends meanwhile."""
    await crowd.look("before")
    for _ in range(num_rounds):
        async with crowd.clients(crowd.bodies(num_requests, max_tokens=7000), reading=False):
            await crowd.wait_until(lambda now: now > 0.98 * num_requests)
            await crowd.look(f"{num_requests:,} requests queued")
        await crowd.wait_until(lambda now: now == 0)
        await crowd.look("all have left")


async def measure_streams(crowd: Crowd, num_streams: int, num_unread: int) -> None:
    await crowd.look("before")
    long = crowd.bodies(num_unread, max_tokens=900, n=UNREAD_CHOICES, logprobs=20, stream=True)
    async with crowd.clients(long, reading=False):
        await crowd.wait_until(lambda now: now > 0)
        await crowd.wait_until(lambda now: now == 0)
        await crowd.look(f"{num_unread} streams given up, unread")
        bodies = crowd.bodies(num_streams, max_tokens=900, stream=True)
        async with crowd.clients(bodies, reading=True):
            await crowd.wait_until(lambda now: now > 0.98 * num_streams)
            await crowd.look(f"and {num_streams:,} streams open")
    await crowd.wait_until(lambda now: now == 0)
    await crowd.look("all have left")


async def on_server(
    flags: tuple[str, ...], measure: Callable[[Crowd], Awaitable[None]], log: Path
) -> list[Moment]:
    with ServerProcess(ensure_demo(print).model, flags, log) as server:
        await asyncio.to_thread(server.wait_until_healthy)
        crowd = Crowd(server)
        async with crowd.clients(crowd.bodies(100, max_tokens=4), reading=True):
            await crowd.wait_until(lambda now: now == 0)  # what a process takes once, it has now
        await measure(crowd)
        return crowd.moments


async def run(args: argparse.Namespace) -> Result:
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="queue-memory-") as directory:
        log = Path(directory) / "server.log"
        if args.what == "queue":
            moments = await on_server(
                QUEUE_FLAGS, lambda crowd: measure_queue(crowd, args.requests, args.rounds), log
            )
        else:
            moments = await on_server(
                STREAM_FLAGS, lambda crowd: measure_streams(crowd, args.streams, args.unread), log
            )
    return Result(machine=machine, prompt_tokens=PROMPT_TOKENS, moments=moments)


def text(moments: list[Moment]) -> str:
    first = moments[0]
    rows = [
        (
            moment.title, f"{moment.num_requests:,}", f"{moment.api_bytes / 2**20:.0f}",
            f"{moment.engine_bytes / 2**20:.0f}",
            *(f"{(now - then) / 1024 / moment.num_connections:.1f}" if moment.num_connections
              else "" for now, then in ((moment.api_bytes, first.api_bytes),
                                        (moment.engine_bytes, first.engine_bytes))),
        )
        for moment in moments
    ]  # fmt: skip
    header = ("", "requests", "API, MiB", "engine, MiB", "KiB a client", "KiB a client")
    return text_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("queue", "streams"))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--unread", type=int, default=50)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    result = asyncio.run(run(args))
    document = {"format": FORMAT, **msgspec.to_builtins(result)}
    write_json(args.results / f"{args.what}_memory.json", document)
    print(text(result.moments))


if __name__ == "__main__":
    main()
