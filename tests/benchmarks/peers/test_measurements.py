from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from benchmarks.peers.measurements import (
    REPEATS,
    Measurement,
    MeasurementFailedError,
    adapter_changes_answers,
    measure,
)
from benchmarks.peers.phases import PHASES
from lora_serve.bench.client import Endpoint
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.workload import make_workload
from tests.fakes.timed_server import TimedServer

MEASUREMENTS = {row.key: m for phase in PHASES for m in phase.measurements for row in m.rows}
REQUIRED = {
    "prefill", "decode-1", "decode-8", "closed-loop", "prefill-adapter", "decode-adapter",
    "int8-decode-1", "int8-activations-prefill", "int4-decode-1",
    "four-cold", "four-hot", "decode-8-of-8", "decode-8-of-1", "zipf-1000", "zipf-4",
}  # fmt: skip


@asynccontextmanager
async def endpoint_of(server: TimedServer) -> AsyncIterator[Endpoint]:
    async with server.listening() as url:
        yield Endpoint(Origin.parse(url), "base")


def small(key: str) -> Measurement:
    """The same measurement with short answers."""
    measurement = MEASUREMENTS[key]
    return replace(measurement, spec=replace(measurement.spec, output_tokens=4))


def test_every_figure_that_the_project_promises_is_measured() -> None:
    assert set(MEASUREMENTS) >= REQUIRED
    rows = [row.key for phase in PHASES for m in phase.measurements for row in m.rows]
    assert len(rows) == len(set(rows))


def test_workloads_are_of_the_promised_sizes() -> None:
    prefill = make_workload(MEASUREMENTS["prefill"].spec)
    assert [(len(r.prompt_token_ids), r.max_tokens) for r in prefill] == [(1024, 1)] * 3
    assert MEASUREMENTS["prefill"].max_concurrency == 1
    loop = make_workload(MEASUREMENTS["closed-loop"].spec)
    assert [(len(r.prompt_token_ids), r.max_tokens) for r in loop] == [(128, 64)] * 16
    assert MEASUREMENTS["closed-loop"].max_concurrency == 8
    eight = make_workload(MEASUREMENTS["decode-8-of-8"].spec)
    assert len({r.adapter for r in eight}) == len(eight) == 8
    assert {r.adapter for r in make_workload(MEASUREMENTS["decode-8-of-1"].spec)} == {"r16-0"}


def test_hot_prefixes_are_those_that_the_cold_run_left() -> None:
    cold = make_workload(MEASUREMENTS["four-cold"].spec)
    hot = make_workload(MEASUREMENTS["four-hot"].spec)
    assert {(r.adapter, r.prompt_token_ids[:512]) for r in cold} == {
        (r.adapter, r.prompt_token_ids[:512]) for r in hot
    }
    assert all(len(r.prompt_token_ids) == 576 for r in (*cold, *hot))
    assert not {r.prompt_token_ids[512:] for r in cold} & {r.prompt_token_ids[512:] for r in hot}


def test_no_two_measurements_on_one_server_share_a_prompt() -> None:
    for phase in PHASES:
        prompts = [
            (request.adapter, request.prompt_token_ids)
            for measurement in phase.measurements
            for request in make_workload(measurement.spec)
        ]
        assert len(set(prompts)) == len(prompts)


async def test_a_decode_step_is_the_median_gap_between_tokens() -> None:
    async with endpoint_of(TimedServer(0.0, 0.02)) as endpoint:
        figures = await measure(endpoint, small("decode-1"))
    figure = figures["decode-1"]
    assert len(figure.values) == REPEATS
    assert 19 <= min(figure.values) <= figure.value <= max(figure.values) < 80


async def test_bundled_tokens_share_the_gap_between_bundles() -> None:
    async with endpoint_of(TimedServer(0.0, 0.06, tokens_per_event=2)) as endpoint:
        figures = await measure(endpoint, small("decode-1"))
    assert 29 <= figures["decode-1"].value < 55


async def test_prefill_is_the_prompts_tokens_over_the_time_to_the_first_one() -> None:
    async with endpoint_of(TimedServer(0.2, 0.0)) as endpoint:
        figures = await measure(endpoint, MEASUREMENTS["prefill"])
    assert 1024 / 0.4 < figures["prefill"].value <= 1024 / 0.19


async def test_no_prompt_of_a_measurement_was_seen_before() -> None:
    server = TimedServer(0.0, 0.0)
    async with endpoint_of(server) as endpoint:
        await measure(endpoint, small("closed-loop"))
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == 8 + REPEATS * 16
    assert len(set(prompts)) == len(prompts)


async def test_a_failed_request_fails_the_measurement_with_its_error() -> None:
    async with endpoint_of(TimedServer(0.0, 0.0)) as endpoint:
        with pytest.raises(MeasurementFailedError, match="no model r16-0"):
            await measure(endpoint, small("prefill-adapter"))


async def test_a_run_that_takes_too_long_is_given_up_with_its_reason() -> None:
    async with endpoint_of(TimedServer(0.3, 0.0)) as endpoint:
        with pytest.raises(MeasurementFailedError, match=r"not done after 0\.1 s"):
            await measure(endpoint, replace(small("decode-1"), run_seconds=0.1))


async def test_an_adapter_that_changes_nothing_is_noticed() -> None:
    server = TimedServer(0.0, 0.0, adapters=("x", "y"), texts={"x": "ba"})
    async with endpoint_of(server) as endpoint:
        assert await adapter_changes_answers(endpoint, "x")
        assert not await adapter_changes_answers(endpoint, "y")
        with pytest.raises(MeasurementFailedError, match="ghost"):
            await adapter_changes_answers(endpoint, "ghost")
