"""17 requests, reported to get wrong answers elsewhere, in half a second, two of them abandoned.

Every request must be equal, token for token and logprob for logprob, to the same request alone on
a cold server; so must be what the two had heard before they left.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from random import Random

import pytest

from lora_serve.demo.client import Client
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.metrics import metric, wait_for
from tests.e2e.recording import (
    Prompted,
    Recorded,
    client_for,
    record,
    record_alone,
    record_until,
)

MAX_TOKENS = 96  # enough to preempt by; slow runs have as many as were reported
REPORTED_MAX_TOKENS = 256
NUM_REPORTED_RUNS = 10
ALPHA, BETA = "trace-a", "trace-b"


@dataclass(frozen=True)
class Arrival:
    """leaves_at_ms: when the client hangs up; its request is then incomplete."""

    name: str
    at_ms: int
    adapter: str
    num_tokens: int
    num_shared: int
    leaves_at_ms: int | None = None


TRACE = (
    Arrival("r1", 0, ALPHA, 600, 512),
    Arrival("thrash_0", 0, ALPHA, 600, 599),
    *(Arrival(f"thrash_{i}", 8 * i, (ALPHA, BETA)[i % 2], 600, 0) for i in range(1, 7)),
    Arrival("r2", 50, BETA, 600, 599),
    *(Arrival(f"thrash_{i}", 8 * i, (ALPHA, BETA)[i % 2], 600, 0) for i in range(7, 11)),
    Arrival("r3", 100, ALPHA, 600, 512, leaves_at_ms=225),
    Arrival("r4", 150, BETA, 513, 512),
    Arrival("r5", 300, BETA, 600, 512, leaves_at_ms=402),
    Arrival("r6", 400, ALPHA, 600, 512),
)


def trace_requests(max_tokens: int = MAX_TOKENS) -> list[Prompted]:
    """Random tokens, so that nothing is shared but what the trace says."""
    shared = random_ids("shared", 600)
    return [
        Prompted(
            arrival.adapter,
            shared[: arrival.num_shared]
            + random_ids(arrival.name, arrival.num_tokens - arrival.num_shared),
            max_tokens,
        )
        for arrival in TRACE
    ]


def random_ids(seed: str, count: int) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(3, 700) for _ in range(count))


async def replay(base_url: str, requests: list[Prompted]) -> list[Recorded]:
    async with client_for(base_url) as http:

        async def play(arrival: Arrival, request: Prompted) -> Recorded:
            await asyncio.sleep(arrival.at_ms / 1000)
            if arrival.leaves_at_ms is None:
                return await record(http, request)
            return await record_until(http, request, (arrival.leaves_at_ms - arrival.at_ms) / 1000)

        return list(
            await asyncio.gather(*(play(a, r) for a, r in zip(TRACE, requests, strict=True)))
        )


def check(played: list[Recorded], alone: list[Recorded]) -> None:
    for arrival, recorded, expected in zip(TRACE, played, alone, strict=True):
        if arrival.leaves_at_ms is None:
            assert recorded.equals(expected), arrival.name
        else:
            assert recorded.is_start_of(expected), arrival.name


@pytest.fixture(scope="module")
def alone(cold_server: ServerProcess, demo_paths: DemoPaths) -> list[Recorded]:
    load_both(cold_server, demo_paths)
    return asyncio.run(record_alone(cold_server.base_url, trace_requests()))


def load_both(process: ServerProcess, demo_paths: DemoPaths) -> None:
    with Client(process.base_url) as client:
        client.load_adapter(ALPHA, demo_paths.alpha, in_place=True)
        client.load_adapter(BETA, demo_paths.beta, in_place=True)


def test_the_trace_shares_what_the_report_says() -> None:
    requests = dict(zip((arrival.name for arrival in TRACE), trace_requests(), strict=True))
    r1, r2, r4 = (requests[name].token_ids for name in ("r1", "r2", "r4"))
    assert r1[:512] == r2[:512] == r4[:512]
    assert r1[512] != r2[512]
    assert requests["thrash_0"].token_ids[:599] == r2[:599]
    assert [len(requests[name].token_ids) for name in ("r1", "r4", "thrash_3")] == [600, 513, 600]


async def test_every_request_of_the_trace_is_as_if_alone(
    server: ServerProcess, demo_paths: DemoPaths, alone: list[Recorded]
) -> None:
    """Cold, warm (every prompt is cached now), and cold again under another salt."""
    load_both(server, demo_paths)
    for cache_salt in ("", "", "another tenant"):
        requests = [request.salted(cache_salt) for request in trace_requests()]
        check(await replay(server.base_url, requests), alone)


async def test_the_trace_is_as_exact_where_steps_overlap(
    overlapped_server: ServerProcess, demo_paths: DemoPaths, alone: list[Recorded]
) -> None:
    load_both(overlapped_server, demo_paths)
    for _ in ("cold", "warm"):
        check(await replay(overlapped_server.base_url, trace_requests()), alone)


async def test_the_trace_is_as_exact_under_preemption(
    tight_server: ServerProcess, demo_paths: DemoPaths, alone: list[Recorded]
) -> None:
    load_both(tight_server, demo_paths)
    preempted = metric(tight_server.base_url, "vllm:num_preemptions_total")
    for cache_salt in ("", "another tenant"):
        requests = [request.salted(cache_salt) for request in trace_requests()]
        check(await replay(tight_server.base_url, requests), alone)
    assert metric(tight_server.base_url, "vllm:num_preemptions_total") > preempted
    wait_for(
        lambda: metric(tight_server.base_url, "vllm:kv_cache_usage_perc") == 0,
        "all blocks free again",
    )


@pytest.mark.slow
async def test_ten_runs_of_the_trace_are_as_if_alone(
    server: ServerProcess, cold_server: ServerProcess, demo_paths: DemoPaths
) -> None:
    for process in (server, cold_server):
        load_both(process, demo_paths)
    requests = trace_requests(REPORTED_MAX_TOKENS)
    alone = await record_alone(cold_server.base_url, requests)
    for run in range(NUM_REPORTED_RUNS):
        salted = [request.salted(f"run {run // 2}") for request in requests]
        check(await replay(server.base_url, salted), alone)


@pytest.mark.slow
async def test_ten_runs_of_the_trace_without_adapters_are_as_if_alone(
    server: ServerProcess, cold_server: ServerProcess
) -> None:
    """On the base model alone the report saw five of ten runs differ."""
    requests = [
        replace(request, model="lora-serve-demo") for request in trace_requests(REPORTED_MAX_TOKENS)
    ]
    alone = await record_alone(cold_server.base_url, requests)
    for run in range(NUM_REPORTED_RUNS):
        salted = [request.salted(f"base run {run // 2}") for request in requests]
        check(await replay(server.base_url, salted), alone)
