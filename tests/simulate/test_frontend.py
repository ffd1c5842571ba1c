"""Requests and tokens pass the API process and the client, one after the other."""

from __future__ import annotations

import msgspec
import pytest

from lora_serve.bench.workload import TimedRequest, WorkloadSpec, draw_requests
from lora_serve.simulate.costs import Costs, Processes, ProcessWork
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.records import Simulated
from tests.simulate.costs import BUSY, COSTS, ENGINE

STEADY = msgspec.structs.replace(BUSY, ratios={})
STEP = 0.01 + 0.001  # of one token
WRITE, BEGIN_CLIENT, BEGIN_API = 20 * 1e-5, 0.0015, 0.003 + 20 * 2e-5
FIRST = (0.001 + 0.0005 + 0.002) + (0.0004 + 0.001)


def answered(requests: list[TimedRequest], costs: Costs, concurrency: int | None) -> Simulated:
    return Fleet(ENGINE, costs, 1, max_concurrency=concurrency).run(requests)


def test_a_lone_request_is_written_sent_read_and_its_tokens_told() -> None:
    (record,) = answered([TimedRequest(tuple(range(20)), 1, at_seconds=1.0)], STEADY, None).records
    sent = 1.0 + WRITE
    step = 0.01 + 20 * 0.0005
    assert record.sent == pytest.approx(sent)
    arrived = sent + BEGIN_CLIENT + 0.003 + BEGIN_API
    assert record.first_token == pytest.approx(arrived + step + FIRST)
    assert record.last_token == record.first_token


def test_the_engine_goes_on_while_tokens_are_told_and_all_share_the_cores() -> None:
    """The step takes both cores; the API process and the client have something to do meanwhile."""
    (record,) = answered([TimedRequest((1, 2), 3)], STEADY, None).records
    # Three threads on two cores: what is told takes half as long again, and a step waits for half
    # of what it takes.
    told = 0.001 + 0.0005 + 0.0004
    steps = STEP + FIRST / 2 + STEP + told / 2
    assert record.last_token - record.first_token == pytest.approx(steps + told - 1.5 * FIRST)


def test_the_next_request_of_a_closed_loop_waits_for_the_end_of_the_one_before() -> None:
    first, second = answered([TimedRequest((1,), 1), TimedRequest((2,), 1)], STEADY, 1).records
    rest = 0.001 + 0.0005
    assert second.sent == pytest.approx(first.last_token + rest + 1e-5)


def test_requests_that_come_together_are_read_one_after_the_other() -> None:
    """The API process takes longer for a request than the engine, so all wait for it."""
    slow = Processes(engine_threads=1.0, api=ProcessWork(begin=0.5))
    requests = [TimedRequest((number,), 1) for number in range(6)]
    costs = msgspec.structs.replace(COSTS, processes=slow)
    records = answered(requests, costs, None).records
    for record in records[:-1]:  # the first ones' tokens wait behind all that came before them
        assert record.first_token == pytest.approx(0.003 + 6 * 0.5)
    assert records[-1].first_token == pytest.approx(0.003 + 6 * 0.5 + 0.01 + 0.001)


def test_no_more_requests_are_answered_than_the_api_process_can_read() -> None:
    spec = WorkloadSpec(num_requests=60, input_tokens=2, output_tokens=2)
    slow = msgspec.structs.replace(COSTS, processes=Processes(api=ProcessWork(begin=0.05)))
    result = Fleet(ENGINE, slow, 1, max_concurrency=8).run(draw_requests(spec))
    assert result.wall_seconds == pytest.approx(60 * 0.05, rel=0.05)


def test_the_cores_do_no_more_than_they_can() -> None:
    """Engine, API process and client keep two cores busy, and share them."""
    spec = WorkloadSpec(num_requests=40, input_tokens=20, output_tokens=10)
    result = Fleet(ENGINE, STEADY, 1, max_concurrency=8).run(draw_requests(spec))
    totals, api, client = result.totals, BUSY.processes.api, BUSY.processes.client
    processes = sum(
        40 * (one.begin + one.first + one.end)
        + 800 * one.prompt_token
        + totals.num_steps * one.message
        + 400 * one.token
        for one in (api, client)
    )
    steps = Fleet(ENGINE, COSTS, 1, max_concurrency=8).run(draw_requests(spec)).totals
    assert totals.busy_seconds[0] > 1.05 * steps.busy_seconds[0]
    assert processes + 2 * 0.9 * steps.busy_seconds[0] < 2 * result.wall_seconds
