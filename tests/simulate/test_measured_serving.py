"""What a server costs beside its steps is found again, of a server that is itself simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from lora_serve.bench.client import Endpoint, RequestRecord
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.load import LoadResult
from lora_serve.bench.workload import TimedRequest, WorkloadSpec, make_workload
from lora_serve.errors import ConfigError
from lora_serve.simulate import measured_serving
from lora_serve.simulate.costs import Costs, Processes, ProcessWork
from lora_serve.simulate.features import StepFeatures
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.measured_serving import ServingFit
from lora_serve.simulate.records import Simulated
from tests.simulate.costs import BUSY, COSTS

ENDPOINT = Endpoint(Origin("http", "nowhere", 1, ""), "m")
ALONE = msgspec.structs.replace(COSTS, request_seconds=0.0)


class Server:
    """Answers as a simulation with these costs does."""

    def __init__(self, costs: Costs, error: str | None = None) -> None:
        self._costs = costs
        self._error = error
        self.api_seconds = 0.0

    async def run_load(
        self, endpoint: Endpoint, requests: Sequence[TimedRequest], max_concurrency: int
    ) -> LoadResult:
        assert all(max(request.prompt_token_ids) < 50 for request in requests)
        fleet = Fleet(self._costs.engine, self._costs, 1, max_concurrency=max_concurrency)
        result = fleet.run(requests)
        processes = self._costs.processes
        self.api_seconds += worked(processes.api, requests, result)
        records = tuple(
            RequestRecord(
                adapter=one.adapter,
                prompt_tokens=one.prompt_tokens,
                late_seconds=0.0,
                e2e_seconds=one.e2e_seconds,
                ttft_seconds=one.ttft_seconds,
                gaps_seconds=(one.last_token - one.first_token,),
                output_tokens=one.output_tokens,
                error=self._error,
            )
            for one in result.records
        )
        client_seconds = worked(processes.client, requests, result)
        return LoadResult(records, result.wall_seconds, client_seconds)


def worked(work: ProcessWork, requests: Sequence[TimedRequest], result: Simulated) -> float:
    """What a process works for a load."""
    return (
        (work.begin + work.first + work.end) * len(requests)
        + work.prompt_token * sum(len(request.prompt_token_ids) for request in requests)
        + work.message * result.totals.num_steps
        + work.token * sum(request.max_tokens for request in requests)
    )


def found(server: Server, monkeypatch: pytest.MonkeyPatch, costs: Costs = ALONE) -> Costs:
    monkeypatch.setattr(measured_serving, "run_load", server.run_load)
    fit = ServingFit(ENDPOINT, vocab_size=50, api_seconds=lambda: server.api_seconds)
    return asyncio.run(fit.fit(costs))


def test_a_server_that_costs_nothing_more_is_found_to(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = found(Server(ALONE), monkeypatch)
    assert costs.serving.values == pytest.approx([0.0] * 9, abs=1e-9)
    assert costs.request_seconds == pytest.approx(0.0, abs=1e-9)
    assert costs.step == ALONE.step


def test_what_a_server_costs_more_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    true = StepFeatures(steps=2e-3, decode_tokens=4e-4, prompts=3e-3)
    real = msgspec.structs.replace(ALONE, serving=true, request_seconds=4e-3)
    costs = found(Server(real), monkeypatch)
    assert costs.serving.steps == pytest.approx(2e-3, rel=0.25)
    assert costs.serving.decode_tokens == pytest.approx(4e-4, rel=0.25)
    assert costs.serving.prompts == pytest.approx(3e-3, rel=0.4)
    assert costs.request_seconds == pytest.approx(4e-3, rel=0.4)


REAL = msgspec.structs.replace(
    BUSY, serving=StepFeatures(steps=1e-3, decode_tokens=2e-4, prompts=2e-3)
)
TOLD = msgspec.structs.replace(
    REAL, serving=StepFeatures(), request_seconds=0.0, processes=Processes(engine_threads=2.0)
)


def test_what_other_processes_work_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = found(Server(REAL), monkeypatch, TOLD)
    for process, true in ((costs.processes.api, BUSY.processes.api),
                          (costs.processes.client, BUSY.processes.client)):  # fmt: skip
        assert process.prompt_token == pytest.approx(true.prompt_token, rel=0.1)
        assert process.token == pytest.approx(true.token, rel=0.1)
    assert costs.processes.api.message == pytest.approx(1e-3, rel=0.1)
    assert before_engine(costs) == pytest.approx(before_engine(BUSY), rel=0.15)
    for kind, ratios in BUSY.ratios.items():
        assert costs.ratios[kind] == pytest.approx(ratios, rel=0.05)


def before_engine(costs: Costs) -> float:
    """Which part of it is work, a server that has time does not show."""
    return costs.request_seconds + costs.processes.api.begin + costs.processes.client.begin


def test_with_what_was_found_a_load_that_was_not_is_foretold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = found(Server(REAL), monkeypatch, TOLD)
    spec = WorkloadSpec(
        num_requests=120, input_tokens=60, output_tokens=12, length_spread=0.5, request_rate=25.0
    )
    true, foretold = (Fleet(one.engine, one, 1).run(make_workload(spec)) for one in (REAL, costs))
    assert foretold.wall_seconds == pytest.approx(true.wall_seconds, rel=0.05)
    assert median_first(foretold) == pytest.approx(median_first(true), rel=0.1)


def median_first(result: Simulated) -> float:
    return sorted(record.ttft_seconds for record in result.records)[len(result.records) // 2]


def test_a_request_that_fails_ends_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="HTTP 503"):
        found(Server(ALONE, error="HTTP 503"), monkeypatch)
