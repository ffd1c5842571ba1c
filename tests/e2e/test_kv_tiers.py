"""Embeddings over HTTP never find the KV of others, whatever outlives the engine.

The device cache is off, so that it is the tiers that are seen. A server ends by a signal that it
cannot catch once its KV is stored, and the next one starts over what it left.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer, ready
from tests.e2e.metrics import metric, wait_for
from tests.fakes.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

HIDDEN_SIZE = 128
BLOCK_SIZE = 16
LONG, LONGER, LONGEST = 512, 2048, 8192
NUM_POSITIONS = 8448
FLAGS = (
    *("--no-enable-prefix-caching", "--enable-prompt-embeds", "--enable-lora"),
    *("--served-model-name", "lora-serve-demo"),
    *("--kv-load-deadline-ms", "60000", "--max-model-len", "4096"),
)


def embeddings(name: str, num_tokens: int) -> str:
    """Two names give two tensors of one shape."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    buffer = io.BytesIO()
    torch.save(torch.randn(num_tokens, HIDDEN_SIZE, generator=generator), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def num_findable(num_tokens: int) -> int:
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


@dataclass(frozen=True)
class Answer:
    """found: prompt tokens that came from a tier."""

    token_ids: list[int]
    logprobs: list[float]
    found: int

    def same_as(self, other: Answer) -> bool:
        return (self.token_ids, self.logprobs) == (other.token_ids, other.logprobs)


def ask(process: ServerProcess, **body: object) -> Answer:
    body = {"model": "lora-serve-demo", "max_tokens": 8, "temperature": 0, "logprobs": 1, **body}
    body |= {"return_token_ids": True, "ignore_eos": True}
    url = f"{process.base_url}/v1/completions"
    reply = httpx.post(url, json=body, timeout=300, verify=False)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    details = reply.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == sum(details.get("cached_tokens_by_tier", {}).values())
    return Answer(
        choice["token_ids"], choice["logprobs"]["token_logprobs"], details["cached_tokens"]
    )


PLACES = ("disk", "redis")
QUICK_PLACES = ("disk", pytest.param("redis", marks=pytest.mark.slow))


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The flag that names where KV outlives servers."""
    if request.param == "disk":
        return "--kv-disk-path", str(tmp_path / "kv")
    server: RedisServer = request.getfixturevalue("redis_server")
    return "--kv-redis-url", server.url


@pytest.fixture(scope="module")
def without_tiers(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("logs") / "off.log"
    with serving(start_server, demo_paths, log) as process:
        yield process


@contextmanager
def serving(
    start: StartServer, paths: DemoPaths, log: Path, *flags: str
) -> Iterator[ServerProcess]:
    with start(paths.model, log, *FLAGS, *flags) as process:
        ready(process)
        yield process


@pytest.fixture
def long_model(demo_paths: DemoPaths, tmp_path: Path) -> DemoPaths:
    """The demo's model with room for answers to LONGEST rows; it needs not be good at them."""
    model = shutil.copytree(demo_paths.model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = NUM_POSITIONS
    (model / "config.json").write_text(json.dumps(config))
    return replace(demo_paths, model=model)


def store_all(process: ServerProcess, num_tokens: int) -> None:
    """Wait until the blocks of so many tokens lie in the tier."""
    name = "lora_serve:kv_tier_saved_blocks_total"
    wanted = num_tokens // BLOCK_SIZE
    wait_for(lambda: metric(process.base_url, name) >= wanted, "the KV to be stored")


def end_it(process: ServerProcess) -> None:
    """Kill the server and its engine process at once, as when the machine's power goes."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Table:
    """What is asked with embeddings and with the ids that stand for them, and the cold answers."""

    def __init__(self, without_tiers: ServerProcess, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.a = {"prompt_embeds": embeddings("a", num_tokens), "cache_salt": "tenant"}
        self.b = {"prompt_embeds": embeddings("b", num_tokens), "cache_salt": "tenant"}
        self.ids = {"prompt": [0] * num_tokens, "cache_salt": "tenant"}
        num_times = 10 if num_tokens == LONG else 2  # as reported; longer ones take seconds each
        bodies = (self.a, self.b, self.ids)
        self.cold_a, self.cold_b, self.cold_ids = (ask(without_tiers, **each) for each in bodies)
        assert not self.cold_a.same_as(self.cold_b)
        for body, cold in ((self.a, self.cold_a), (self.b, self.cold_b)):
            again = [ask(without_tiers, **body) for _ in range(num_times - 1)]
            assert all(answer.same_as(cold) for answer in again)  # row 1
            assert not any(answer.found for answer in (cold, *again))  # row 5

    def store(self, server: ServerProcess) -> int:
        """How many tokens are to be stored then."""
        empty = ask(server, **{**self.b, "cache_salt": "before anything is stored"})  # row 4
        assert empty.same_as(self.cold_b)
        assert empty.found == 0
        assert ask(server, **self.a).same_as(self.cold_a)
        return 2 * self.num_tokens

    def check_what_was_stored(self, server: ServerProcess) -> int:
        """Hold that it is found for what it is of, and for nothing else; as `store`."""
        for answer, cold in (
            (ask(server, **self.b), self.cold_b),  # row 2
            (ask(server, **{**self.b, "cache_salt": "another"}), self.cold_b),  # row 3
            (ask(server, **self.ids), self.cold_ids),  # row 6
        ):
            assert answer.same_as(cold)
            assert answer.found == 0
        warm = ask(server, **self.a)  # row 7
        assert warm.same_as(self.cold_a)
        assert warm.found == num_findable(self.num_tokens)
        assert warm.found > 0.95 * self.num_tokens
        return 3 * self.num_tokens


@pytest.mark.parametrize("place", QUICK_PLACES, indirect=True)
@pytest.mark.parametrize("num_tokens", [LONG, pytest.param(LONGER, marks=pytest.mark.slow)])
def test_restarts_mix_up_neither_embeddings_of_one_length_nor_versions_of_an_adapter(
    demo_paths: DemoPaths,
    start_server: StartServer,
    without_tiers: ServerProcess,
    place: tuple[str, str],
    tmp_path: Path,
    num_tokens: int,
) -> None:
    """An adapter is retrained in place between two lives of the server."""
    table, adapter = Table(without_tiers, num_tokens), tmp_path / "adapter"
    prompt = {"model": "tenant", "prompt": [3 + i % 700 for i in range(LONG)]}
    colds: dict[Path, Answer] = {}
    for life, source in enumerate((demo_paths.alpha, demo_paths.beta, demo_paths.alpha)):
        adapter.unlink(missing_ok=True)
        adapter.symlink_to(source)
        flags = (*place, "--lora-modules", f"tenant={adapter}")
        with serving(start_server, demo_paths, tmp_path / f"{life}.log", *flags) as server:
            answer = ask(server, **prompt)
            assert answer.found == (num_findable(LONG) if source in colds else 0)
            assert answer.same_as(colds.setdefault(source, answer))
            num_saved = LONG if life < 2 else 0
            if life == 0:
                num_saved += table.store(server)
            elif life == 1:
                num_saved += table.check_what_was_stored(server)
            store_all(server, num_saved)
            end_it(server)
    assert not colds[demo_paths.alpha].same_as(colds[demo_paths.beta])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_the_longest_embeddings_never_share_kv_across_a_restart(
    long_model: DemoPaths, start_server: StartServer, place: tuple[str, str], tmp_path: Path
) -> None:
    def start(log: Path, *flags: str) -> AbstractContextManager[ServerProcess]:
        longer = ("--max-model-len", str(NUM_POSITIONS))
        return serving(start_server, long_model, log, *flags, *longer)

    with start(tmp_path / "off.log") as without_tiers:
        table = Table(without_tiers, LONGEST)
        with start(tmp_path / "first.log", *place) as server:
            store_all(server, table.store(server))
            end_it(server)
        with start(tmp_path / "second.log", *place) as server:
            table.check_what_was_stored(server)
