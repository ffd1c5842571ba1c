"""python -m benchmarks.speed.streaming: what the server's process spends on a streamed token.

An engine that answers at once stands for the real one; its messages are encoded and decoded as they
would be. Each stream is a whole request to the application, from its body to its last event; only
the sockets are left out. With --sockets they are not, and clients ask from another process: through
each of uvicorn's HTTP parsers that is installed. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.importer import import_from_string

from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ensure_checkpoint
from benchmarks.speed.streaming_client import request_body
from lora_serve.config import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.messages import (
    EngineMessage,
    EngineOutput,
    EngineReady,
    EngineReply,
    EngineRequest,
    StepOutputs,
)
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.server.app import create_app
from lora_serve.server.http.acceptor import AcceptingServer
from lora_serve.server.http.connections import Connections
from lora_serve.server.http.serving import http_config
from lora_serve.text.tokenizer import Tokenizer

DEFAULT_MODEL = Path("~/.cache/lora-serve/bench/model").expanduser()
FIRST_IDS = 1000  # of the vocabulary, which are given in turn
READY = EngineReady(b"", "bfloat16", 151_936, 896, 32_768, 100_000, "none", 32_768)


class InstantEngine:
    """Gives every request one token a step."""

    def __init__(self) -> None:
        self._growing: dict[str, int] = {}  # tokens that are still to come
        self._arrived = asyncio.Event()
        self._token = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineReply).decode
        self.is_alive = True
        self.pid = None

    async def start(self, config: EngineConfig) -> EngineReady:
        return READY

    async def send(self, message: EngineMessage) -> None:
        if isinstance(message, EngineRequest):
            max_tokens = message.request.params.max_tokens or 0
            self._growing |= dict.fromkeys(message.choice_ids, max_tokens)
            self._arrived.set()

    async def receive(self) -> EngineReply:
        await asyncio.sleep(0)  # as a socket would, let others run
        while not self._growing:
            self._arrived.clear()
            await self._arrived.wait()
        outputs = tuple(self._next(request_id) for request_id in list(self._growing))
        return self._decode(self._encode(StepOutputs(outputs, step_num_tokens=len(outputs))))

    def _next(self, request_id: str) -> EngineOutput:
        self._token = (self._token + 1) % FIRST_IDS
        left = self._growing[request_id] = self._growing[request_id] - 1
        if left == 0:
            del self._growing[request_id]
        return EngineOutput(request_id, (self._token,), finish_reason=None if left else "length")

    async def kill(self) -> None:
        self.is_alive = False

    async def close(self) -> None:
        self.is_alive = False


@dataclass(frozen=True, slots=True)
class Result:
    """What one run showed: how many streams at once, through what, and what a token costs."""

    way: str
    num_streams: int
    num_tokens: int
    num_events: int
    microseconds_per_token: float


App = Callable[[Any, Any, Any], Awaitable[None]]


def make_engine(model: Path, num_streams: int) -> AsyncEngine:
    scheduler = SchedulerConfig(max_num_seqs=num_streams)
    config = EngineConfig(model=ModelConfig(model=str(model)), scheduler=scheduler)
    tokenizer = Tokenizer(str(model))
    return AsyncEngine(config, InstantEngine(), READY, tokenizer, EngineMetrics("bench", config))


async def measure(model: Path, num_streams: int, num_tokens: int) -> Result:
    """The processor time of this process, over all tokens of all streams."""
    engine = make_engine(model, num_streams)
    app: Any = create_app(engine, ServerConfig())
    await asyncio.gather(*(_stream(app, str(model), 8) for _ in range(num_streams)))  # warm up
    begin = time.process_time()
    counts = await asyncio.gather(
        *(_stream(app, str(model), num_tokens) for _ in range(num_streams))
    )
    seconds = time.process_time() - begin
    await engine.shutdown()
    total = num_streams * num_tokens
    return Result("no sockets", num_streams, num_tokens, sum(counts), seconds / total * 1e6)


async def measure_sockets(model: Path, num_streams: int, num_tokens: int, http: str) -> Result:
    """The same with a connection for each stream, from clients in another process."""
    engine = make_engine(model, num_streams)
    config = ServerConfig()
    connections = Connections(config, import_from_string(HTTP_PROTOCOLS[http]))
    server = AcceptingServer(http_config(create_app(engine, config), config, connections))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await _ask_from_elsewhere(url, model, num_streams, 8)  # warm up
        begin = time.process_time()
        num_events = await _ask_from_elsewhere(url, model, num_streams, num_tokens)
        seconds = time.process_time() - begin
        server.should_exit = True
        await serving
    await engine.shutdown()
    return Result(
        http, num_streams, num_tokens, num_events, seconds / num_streams / num_tokens * 1e6
    )


async def _ask_from_elsewhere(url: str, model: Path, num_streams: int, num_tokens: int) -> int:
    """How many events came."""
    command = (sys.executable, "-m", "benchmarks.speed.streaming_client", url, str(model))
    client = await asyncio.create_subprocess_exec(
        *command, str(num_streams), str(num_tokens), stdout=asyncio.subprocess.PIPE
    )
    told, _ = await client.communicate()
    assert client.returncode == 0, "the clients failed"
    return int(told)


async def _stream(app: App, model: str, num_tokens: int) -> int:
    """One streamed completion; returns how many events came."""
    body = request_body(model, num_tokens)
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    num_events = 0
    is_over = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal num_events
        if message["type"] == "http.response.start":
            assert message["status"] == 200, f"refused with {message['status']}"
        else:
            num_events += message["body"].count(b"data: {")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "scheme": "http",
    }
    await app(scope, receive, send)
    is_over.set()
    return num_events


def runs(
    model: Path, streams: Sequence[int], num_tokens: int, *, sockets: bool
) -> Iterator[Coroutine[None, None, Result]]:
    for num_streams in streams:
        yield measure(model, num_streams, num_tokens)
        for http in ("h11", "httptools"):
            if sockets and importlib.util.find_spec(http) is not None:
                yield measure_sockets(model, num_streams, num_tokens, http)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--sockets", action="store_true", help="measure with them, too")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    model = ensure_checkpoint(arguments.model)
    print("| through | streams | us a token | tokens a second of one core |\n|---|--:|--:|--:|")
    results = []
    for run in runs(model, arguments.streams, arguments.tokens, sockets=arguments.sockets):
        result = asyncio.run(run)
        results.append(result)
        cost = result.microseconds_per_token
        row = (result.way, result.num_streams, f"{cost:.0f}", f"{1e6 / cost:.0f}")
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    write_facts(arguments.out, rows=results)


if __name__ == "__main__":
    main()
