"""Admin calls that meet each other, running answers and the death of an engine, over HTTP.

Pairs and triples of calls are drawn from a seed and sent at once. What their outcomes allow, in any
order of them, is what names may stand for: answers, /v1/models and the judge must agree on that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest

from lora_serve.bench.http_stream import Origin
from lora_serve.cli.arguments import add_config_arguments, engine_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import MODEL_NAME, Server, server_flags
from lora_serve.demo.server_process import ServerProcess
from lora_serve.fuzz.answers import Heard
from lora_serve.fuzz.client import FuzzClient
from lora_serve.fuzz.judge import Judge
from lora_serve.fuzz.player import RESTARTS, Player, ServerUnderTest
from lora_serve.fuzz.reference import ColdEngine
from lora_serve.fuzz.timeline import ABSENT, Timeline
from lora_serve.fuzz.trace import (
    AdapterCall,
    Ask,
    ConcurrentCalls,
    Event,
    Kill,
    Load,
    Reset,
    Tokens,
    Trace,
    Unload,
)
from lora_serve.fuzz.versions import write_versions
from lora_serve.sampling_params import SamplingParams
from tests.e2e.conftest import StartServer
from tests.e2e.metrics import metric

SEEDS = (1, 2, 3)
SEED_OF_THE_KILL = 2
NUM_TURNS = 10  # of concurrent calls, for each seed
NAMES = ("red", "green")
PROMPTS = tuple(Tokens(tuple(3 + (i * step) % 250 for i in range(70))) for step in (1, 7))
BLOCK_SIZE = 16
FLAGS = (*server_flags(Server.CACHED), "--num-gpu-blocks-override", "64")


@pytest.fixture(scope="module")
def versions(demo_paths: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    sources = (demo_paths.alpha, demo_paths.beta)
    return write_versions(sources, tmp_path_factory.mktemp("races") / "versions")


@pytest.fixture(scope="module")
def cold(
    demo_paths: DemoPaths, versions: tuple[Path, ...], more_flags: list[str]
) -> Iterator[ColdEngine]:
    parser = OneLineParser()
    add_config_arguments(parser)
    args = parser.parse_args([str(demo_paths.model), *FLAGS, *more_flags])
    engine = ColdEngine(engine_config(args), versions)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def raced_server(
    demo_paths: DemoPaths, tmp_path_factory: pytest.TempPathFactory, start_server: StartServer
) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("races")
    tiers = ("--kv-ram-bytes", str(2**20), "--kv-disk-path", str(directory / "kv"))
    with start_server(demo_paths.model, directory / "log", *FLAGS, *tiers) as process:
        process.wait_until_healthy()
        yield process


def an_ask(lora_name: str, prompt: Tokens, max_tokens: int, seed: int = 0) -> Ask:
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, seed=seed
    )
    return Ask(prompt=prompt, params=params, lora_name=lora_name)


def a_call(rng: Random, name: str, num_versions: int) -> AdapterCall:
    version = rng.randrange(num_versions)
    return rng.choice(
        (
            Load(lora_name=name, version=version, in_place=False),
            Load(lora_name=name, version=version),
            Load(lora_name=name, version=version),
            Unload(lora_name=name),
            Reset(lora_name=name),
            Reset(),
        )
    )


def races(seed: int, num_versions: int) -> Trace:
    """Turns of completions, some of which still run, and of calls that are sent at once."""
    rng = Random(seed)
    events: list[Event] = [Load(lora_name=name, version=0) for name in NAMES]
    for turn in range(NUM_TURNS):
        for name in rng.choices(NAMES, k=3):
            events.append(an_ask(name, rng.choice(PROMPTS), rng.choice((4, 40))))
        name = rng.choice(NAMES)
        calls = tuple(a_call(rng, name, num_versions) for _ in range(rng.choice((2, 3))))
        events.append(ConcurrentCalls(calls=calls, wait_ms=rng.choice((0, 5, 20))))
        if seed == SEED_OF_THE_KILL and turn == NUM_TURNS // 2:
            events.append(Kill())
    return Trace(seed=seed, events=tuple(events))


def listed_names(server: ServerProcess, prefix: str) -> set[str]:
    models = httpx.get(f"{server.base_url}/v1/models", timeout=30).json()["data"]
    ids = {model["id"] for model in models}
    return {name for name in NAMES if f"{prefix}{name}" in ids}


@pytest.mark.parametrize("seed", SEEDS)
def test_concurrent_admin_calls_leave_what_some_order_of_them_leaves(
    raced_server: ServerProcess,
    cold: ColdEngine,
    versions: tuple[Path, ...],
    seed: int,
    tmp_path: Path,
) -> None:
    prefix = f"{seed}-"
    player = Player(
        ServerUnderTest(
            client=FuzzClient(Origin.parse(raced_server.base_url)),
            base_model=MODEL_NAME,
            hidden_size=cold.hidden_size,
            versions=versions,
            workspace=tmp_path,
            prefix=prefix,
            server_pid=raced_server.pid,
        )
    )
    num_restarts = metric(raced_server.base_url, RESTARTS)
    raced = races(seed, len(versions))
    records = asyncio.run(player.play(raced))
    listed = listed_names(raced_server, prefix)
    timeline = Timeline(raced, records)
    later = Trace(
        seed=seed,
        concurrency=1,
        events=tuple(an_ask(name, prompt, 24) for name in NAMES for prompt in PROMPTS),
    )
    told = asyncio.run(player.play(later))
    whole = Trace(seed=seed, events=(*raced.events, *later.events))
    findings = Judge(whole, [*records, *told], cold, BLOCK_SIZE).findings()
    assert not findings, f"seed {seed}: {findings}"
    for name in NAMES:
        possible = timeline.versions(name, math.inf, math.inf)
        is_listed = name in listed
        assert possible - {ABSENT} if is_listed else ABSENT in possible, f"seed {seed}: {name}"
    for ask, heard in zip(later.events, told, strict=True):
        assert isinstance(ask, Ask)
        assert isinstance(heard, Heard)
        assert heard.is_whole == (ask.lora_name in listed), f"seed {seed}: {ask.lora_name}"
    num_kills = int(seed == SEED_OF_THE_KILL)
    died = metric(raced_server.base_url, RESTARTS) - num_restarts
    assert died == num_kills, f"seed {seed}: {raced_server.last_log_lines()}"
