"""A consumer of a live server's KV events: it never expects KV that a request would not find.

It loses messages and asks for them again, lives through a kill of the engine, and knows adapters by
name alone while they are replaced.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
import zmq

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import MODEL_NAME, Server, server_flags
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer, ready
from tests.e2e.metrics import metric, wait_for
from tests.e2e.test_engine_restart import engine_pid
from tests.fakes.kv_event_consumers import Subscriber, decode_as_dynamo

BLOCK_SIZE = 16
PROMPT = [3 + (i * 7) % 700 for i in range(6 * BLOCK_SIZE)]
PATIENCE = 60.0


class Consumer:
    """Reads in a thread of its own until it is closed. With a rng it loses every fifth message."""

    def __init__(self, directory: Path, rng: Random | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.lock = threading.Lock()
        self.subscriber = Subscriber(
            self._context,
            f"ipc://{directory}/events",
            f"ipc://{directory}/replay",
            lambda number: rng is not None and rng.random() < 0.2,
        )
        self._is_closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while not self._is_closed:
                if self.subscriber._socket.poll(50):
                    with self.lock:
                        self.subscriber.read(0.0)
        except Exception as error:  # for who looks at what it has read
            self._error = error

    def expected(self, name: str | None, prompt: list[int] = PROMPT) -> list[set[int]]:
        """The blocks that it would send a request of this name for."""
        with self.lock:
            if self._error is not None:
                raise self._error
            return self.subscriber.indexer.hashes(name, prompt, BLOCK_SIZE)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(PATIENCE)  # longer than a replay may take
        assert not self._thread.is_alive(), "it still reads"
        self.subscriber.close()
        self._context.destroy(linger=0)
        if self._error is not None:
            raise self._error


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv-events")


@pytest.fixture(scope="module")
def server(
    demo_paths: DemoPaths, directory: Path, start_server: StartServer
) -> Iterator[ServerProcess]:
    settings = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{directory}/events",
        "replay_endpoint": f"ipc://{directory}/replay",
        "topic": f"kv@127.0.0.1:8000@{MODEL_NAME}",
    }
    flags = (
        *server_flags(Server.CACHED),
        *("--kv-events-config", json.dumps(settings), "--kv-ram-bytes", "64MiB"),
        *("--num-gpu-blocks-override", "64", "--max-model-len", "512", "--validate"),
    )
    with start_server(demo_paths.model, directory / "log", *flags) as process:
        yield ready(process)


@contextmanager
def consuming(directory: Path, rng: Random | None = None) -> Iterator[Consumer]:
    consumer = Consumer(directory, rng)
    try:
        yield consumer
    finally:
        consumer.close()


def post(server: ServerProcess, route: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.base_url}{route}", json=body, timeout=300).raise_for_status()


def load(server: ServerProcess, name: str, path: Path) -> None:
    post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), load_inplace=True)


def ask(server: ServerProcess, name: str, prompt: list[int] = PROMPT) -> int:
    """How many blocks of the prompt were found on the device."""
    reply = post(server, "/v1/completions", model=name, prompt=prompt, max_tokens=1, temperature=0)
    details = reply.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens_by_tier"]["device"]) // BLOCK_SIZE


def until(condition: Callable[[], bool], what: str) -> None:
    wait_for(condition, what, PATIENCE)


def test_a_consumer_expects_what_is_found_through_replacements_and_lost_messages(
    server: ServerProcess, demo_paths: DemoPaths, directory: Path
) -> None:
    with consuming(directory) as careful, consuming(directory, Random(3)) as lossy:
        load(server, "tenant", demo_paths.alpha)
        assert ask(server, "tenant") == 0
        until(lambda: len(careful.expected("tenant")) == 6, "the first version to be told of")
        alpha = careful.expected("tenant")
        assert ask(server, "tenant") == len(alpha) - 1  # the last token is computed
        assert careful.expected(None) == []
        for path, other in [(demo_paths.beta, demo_paths.alpha)] * 3:
            load(server, "tenant", path)
            until(lambda: careful.expected("tenant") != alpha, "the old version to be taken back")
            found = ask(server, "tenant")
            until(lambda: len(careful.expected("tenant")) == 6, "the new version to be told of")
            assert not any(a & b for a, b in zip(alpha, careful.expected("tenant"), strict=True))
            load(server, "tenant", other)
            until(lambda: careful.expected("tenant") == alpha, "what is found again to be told of")
            assert found in (0, 5)  # cold at first, then what was kept of it
        for number in range(12):  # fills the pool more than once
            ask(server, MODEL_NAME, [number + 3, *PROMPT])
        post(server, "/v1/unload_lora_adapter", lora_name="tenant")
        until(lambda: not careful.expected("tenant"), "an unloaded name to be taken back")
        ask(server, MODEL_NAME)
        until(lambda: are_equal(careful, lossy, server), "both consumers to know the same")
        assert lossy.subscriber.num_replays > 0
        for payload in careful.subscriber.payloads:
            decode_as_dynamo(payload)
        assert metric(server.base_url, "lora_serve:kv_event_batches_lost_total") == 0


def are_equal(one: Consumer, other: Consumer, server: ServerProcess) -> bool:
    """Whether both know the same; else something happens that the second may notice a gap by."""
    with one.lock, other.lock:
        is_equal = one.subscriber.indexer._where == other.subscriber.indexer._where
        if is_equal and one.subscriber.next_number == other.subscriber.next_number:
            return True
    ask(server, MODEL_NAME, [5, *PROMPT[: 2 * BLOCK_SIZE]])
    post(server, "/reset_prefix_cache")
    return False


def test_a_killed_engine_is_followed_by_one_that_begins_with_nothing(
    server: ServerProcess, directory: Path
) -> None:
    with consuming(directory) as consumer:
        post(server, "/reset_prefix_cache")
        ask(server, MODEL_NAME)
        until(lambda: len(consumer.expected(None)) == 6, "the prompt to be told of")
        os.kill(engine_pid(server), signal.SIGKILL)
        ready(server)
        until(lambda: not consumer.expected(None), "a new engine to be heard")
        other = [*PROMPT[BLOCK_SIZE:], *PROMPT]
        assert ask(server, MODEL_NAME, other) == 0
        until(lambda: len(consumer.expected(None, other)) == 11, "the next prompt to be told of")
        assert consumer.expected(None) == []
        assert ask(server, MODEL_NAME, other) == 10
