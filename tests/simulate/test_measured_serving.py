"""What a server costs beside its steps is found again, of a server that is itself simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from lora_serve.bench.client import Endpoint, RequestRecord
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.load import LoadResult
from lora_serve.bench.workload import TimedRequest
from lora_serve.errors import ConfigError
from lora_serve.simulate import measured_serving
from lora_serve.simulate.costs import Costs
from lora_serve.simulate.features import StepFeatures
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.measured_serving import ServingFit
from tests.simulate.costs import COSTS

ENDPOINT = Endpoint(Origin("http", "nowhere", 1, ""), "m")
ALONE = msgspec.structs.replace(COSTS, request_seconds=0.0)


class Server:
    """Answers as a simulation with these costs does."""

    def __init__(self, costs: Costs, error: str | None = None) -> None:
        self._costs = costs
        self._error = error

    async def run_load(
        self, endpoint: Endpoint, requests: Sequence[TimedRequest], max_concurrency: int
    ) -> LoadResult:
        assert all(max(request.prompt_token_ids) < 50 for request in requests)
        fleet = Fleet(self._costs.engine, self._costs, 1, max_concurrency=max_concurrency)
        result = fleet.run(requests)
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
        return LoadResult(records, result.wall_seconds, 0.0)


def found(server: Server, monkeypatch: pytest.MonkeyPatch) -> Costs:
    monkeypatch.setattr(measured_serving, "run_load", server.run_load)
    return asyncio.run(ServingFit(ENDPOINT, vocab_size=50).fit(ALONE))


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


def test_a_request_that_fails_ends_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="HTTP 503"):
        found(Server(ALONE, error="HTTP 503"), monkeypatch)
