"""What serving costs beside the engine's own steps: a real server under known loads.

Each load is simulated with the engine's steps alone. What the real one takes longer is the API
process, the sockets and the client, which share the machine: so much more a step, a token and a
prompt; and what one lone request waits longer for its first token is its way in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import msgspec

from lora_serve.bench.client import Endpoint, RequestRecord
from lora_serve.bench.load import LoadResult, run_load
from lora_serve.bench.workload import TimedRequest, WorkloadSpec, make_workload
from lora_serve.errors import ConfigError
from lora_serve.simulate.costs import Costs
from lora_serve.simulate.fit import fit_named
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.policies import RoundRobin
from lora_serve.simulate.records import Simulated

BATCHES = (1, 2, 4, 8, 16)
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 24
NUM_ALONE = 8
NUM_SHORT = 32  # requests of one token, which show what a request costs
SHORT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class _Load:
    """Requests that are all due at once, and how many of them may run."""

    requests: tuple[TimedRequest, ...]
    concurrency: int

    @classmethod
    def of(cls, num_requests: int, concurrency: int, output_tokens: int, seed: int) -> _Load:
        spec = WorkloadSpec(
            seed=seed,
            num_requests=num_requests,
            input_tokens=PROMPT_TOKENS,
            output_tokens=output_tokens,
        )
        return cls(make_workload(spec), concurrency)

    async def measured(self, endpoint: Endpoint) -> LoadResult:
        result = await run_load(endpoint, self.requests, self.concurrency)
        failed = [record.error for record in result.records if record.error is not None]
        if failed:
            raise ConfigError(f"a request of the calibration failed: {failed[0]}")
        return result

    def simulated(self, costs: Costs) -> Simulated:
        fleet = Fleet(costs.engine, costs, 1, RoundRobin(1), self.concurrency)
        return fleet.run(self.requests)


async def fit_serving(costs: Costs, endpoint: Endpoint) -> Costs:
    """The costs with `serving` and `request_seconds` as the server at `endpoint` has them.

    Raises:
        ConfigError: a request failed.
    """
    await _Load.of(4, 2, OUTPUT_TOKENS, seed=-1).measured(endpoint)  # the first ones are slower
    costs = await _with_tokens(costs, endpoint)
    costs = await _with_prompts(costs, endpoint)
    return await _with_requests(costs, endpoint)


async def _with_tokens(costs: Costs, endpoint: Endpoint) -> Costs:
    """How much longer a step is, and a token of it: by the time a token, at several batches."""
    rows, more = [], []
    for number, size in enumerate(BATCHES):
        if size <= costs.engine.max_num_seqs:
            load = _Load.of(max(size, 3), size, OUTPUT_TOKENS, seed=number)
            measured = (await load.measured(endpoint)).records
            simulated = load.simulated(costs).records
            rows.append({"steps": 1.0, "decode_tokens": float(size)})
            more.append(_token_seconds(measured) - _token_seconds(simulated))
    found = fit_named(rows, more, ("steps", "decode_tokens"))
    return msgspec.structs.replace(costs, serving=costs.serving.plus(found))


async def _with_prompts(costs: Costs, endpoint: Endpoint) -> Costs:
    """How much longer a step is for each prompt in it: by requests of one token."""
    concurrency = min(SHORT_CONCURRENCY, costs.engine.max_num_seqs)
    load = _Load.of(NUM_SHORT, concurrency, 1, seed=100)
    measured = (await load.measured(endpoint)).wall_seconds
    more = (measured - load.simulated(costs).wall_seconds) / NUM_SHORT
    found = fit_named([{"prompts": 1.0}], [more], ("prompts",))
    return msgspec.structs.replace(costs, serving=costs.serving.plus(found))


async def _with_requests(costs: Costs, endpoint: Endpoint) -> Costs:
    """How long a lone request is on its way: by its first token."""
    load = _Load.of(NUM_ALONE, 1, 2, seed=200)
    measured = median(record.ttft_seconds for record in (await load.measured(endpoint)).records)
    simulated = median(record.ttft_seconds for record in load.simulated(costs).records)
    return msgspec.structs.replace(costs, request_seconds=max(0.0, measured - simulated))


def _token_seconds(records: Sequence[RequestRecord] | Sequence[object]) -> float:
    return fmean(getattr(record, "tpot_seconds", None) or 0.0 for record in records)
