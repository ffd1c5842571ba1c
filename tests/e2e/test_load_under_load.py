"""A request runs from its first to its last token on the version it was admitted with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from lora_serve.demo.client import Client
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.recording import (
    Prompted,
    Recorded,
    client_for,
    record,
    record_alone,
    record_together,
)
from tests.e2e.test_trace import random_ids

NUM_REQUESTS = 4
MAX_TOKENS = 800
# A busy machine may take longer for a load than for whole answers.
MAX_PLAYS = 20


def requests_to(model: str) -> list[Prompted]:
    return [
        Prompted(model, random_ids(f"load {i}", 100 + i), MAX_TOKENS) for i in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def versions(cold_server: ServerProcess, demo_paths: DemoPaths) -> dict[str, list[Recorded]]:
    """What alpha and beta answer, each alone on a cold server."""
    with Client(cold_server.base_url) as client:
        client.load_adapter("only-alpha", demo_paths.alpha)
        client.load_adapter("only-beta", demo_paths.beta)
    return {
        name: asyncio.run(record_alone(cold_server.base_url, requests_to(f"only-{name}")))
        for name in ("alpha", "beta")
    }


async def load(http: httpx.AsyncClient, name: str, path: Path) -> None:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    response = await http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 200, response.text


async def answering(
    http: httpx.AsyncClient, requests: list[Prompted]
) -> list[asyncio.Task[Recorded]]:
    """Tasks of which each has had a few tokens, and each has most of its answer before it."""
    begun = [asyncio.Event() for _ in requests]

    def listener(event: asyncio.Event) -> object:
        return lambda count: event.set() if count >= 3 else None

    tasks = [
        asyncio.create_task(record(http, request, on_token=listener(event)))  # type: ignore[arg-type]
        for request, event in zip(requests, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def until_it_meets_answers(play: Callable[[], Awaitable[bool]]) -> None:
    """Play again where every answer had ended before the change: such a play shows nothing."""
    for _ in range(MAX_PLAYS):
        if await play():
            return
    pytest.fail(f"the answers of {MAX_PLAYS} plays had all ended before the change was made")


def fingerprints_of(recorded: list[Recorded]) -> set[str]:
    """One of each answer."""
    assert all(len(one.fingerprints) == 1 for one in recorded)
    return set.union(*(one.fingerprints for one in recorded))


def same(recorded: list[Recorded], expected: list[Recorded]) -> bool:
    return all(one.equals(other) for one, other in zip(recorded, expected, strict=True))


async def test_running_requests_keep_their_version_and_new_ones_get_the_new(
    server: ServerProcess, demo_paths: DemoPaths, versions: dict[str, list[Recorded]]
) -> None:
    async with client_for(server.base_url) as http:

        async def play() -> bool:
            await load(http, "hot", demo_paths.alpha)
            old_tasks = await answering(http, requests_to("hot"))
            await load(http, "hot", demo_paths.beta)
            were_running = not all(task.done() for task in old_tasks)
            new = await asyncio.gather(*(record(http, request) for request in requests_to("hot")))
            old = await asyncio.gather(*old_tasks)
            assert same(old, versions["alpha"])
            assert same(list(new), versions["beta"])
            assert fingerprints_of(old).isdisjoint(fingerprints_of(new))
            return were_running

        await until_it_meets_answers(play)


async def test_an_unloaded_name_is_gone_at_once_and_its_requests_end_well(
    server: ServerProcess, demo_paths: DemoPaths, versions: dict[str, list[Recorded]]
) -> None:
    async with client_for(server.base_url) as http:

        async def play() -> bool:
            await load(http, "leaving", demo_paths.alpha)
            tasks = await answering(http, requests_to("leaving"))
            response = await http.post("/v1/unload_lora_adapter", json={"lora_name": "leaving"})
            assert response.status_code == 200
            were_running = not all(task.done() for task in tasks)
            response = await http.post("/v1/completions", json={"model": "leaving", "prompt": "Hi"})
            assert response.status_code == 404
            assert same(list(await asyncio.gather(*tasks)), versions["alpha"])
            return were_running

        await until_it_meets_answers(play)


async def test_versions_that_change_all_the_time_never_mix(
    server: ServerProcess, demo_paths: DemoPaths, versions: dict[str, list[Recorded]]
) -> None:
    """Each answer is wholly one version's, whichever was loaded when it was admitted."""
    async with client_for(server.base_url) as http:
        await load(http, "flapping", demo_paths.alpha)
        asked = [asyncio.create_task(record(http, r)) for r in requests_to("flapping") * 3]
        for round_number in range(12):
            await load(http, "flapping", (demo_paths.beta, demo_paths.alpha)[round_number % 2])
        answers = await asyncio.gather(*asked)
    for i, answer in enumerate(answers):
        choices = [versions[name][i % NUM_REQUESTS] for name in versions]
        assert any(answer.equals(choice) for choice in choices)


async def test_alpha_and_beta_differ_where_these_tests_look(
    server: ServerProcess, demo_paths: DemoPaths, versions: dict[str, list[Recorded]]
) -> None:
    assert not any(
        alpha.equals(beta) for alpha, beta in zip(versions["alpha"], versions["beta"], strict=True)
    )
    async with client_for(server.base_url) as http:
        await load(http, "quiet", demo_paths.alpha)
    assert same(await record_together(server.base_url, requests_to("quiet")), versions["alpha"])
