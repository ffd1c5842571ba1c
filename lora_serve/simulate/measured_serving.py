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
from lora_serve.simulate.features import StepFeatures
from lora_serve.simulate.fit import fit_named
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.records import Simulated, SimulatedRequest

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

    def simulated(self, costs: Costs) -> Simulated:
        fleet = Fleet(costs.engine, costs, 1, max_concurrency=self.concurrency)
        return fleet.run(self.requests)


class ServingFit:
    """Loads on the server at `endpoint`, whose model has a vocabulary of vocab_size tokens."""

    def __init__(self, endpoint: Endpoint, vocab_size: int) -> None:
        self._endpoint = endpoint
        self._vocab_size = vocab_size
        self._num_loads = 0

    async def fit(self, costs: Costs) -> Costs:
        """The costs with `serving` and `request_seconds` as this server has them.

        Raises:
            ConfigError: a request failed.
        """
        await self._measured(self._load(4, 2, OUTPUT_TOKENS))  # the first ones are slower
        costs = await self._with_tokens(costs)
        costs = await self._with_prompts(costs)
        return await self._with_requests(costs)

    async def _with_tokens(self, costs: Costs) -> Costs:
        """How much longer a step is, and a token of it: by the time a token, at several batches."""
        rows, more = [], []
        for size in BATCHES:
            if size <= costs.engine.max_num_seqs:
                load = self._load(max(size, 3), size, OUTPUT_TOKENS)
                measured = (await self._measured(load)).records
                simulated = load.simulated(costs).records
                rows.append({"steps": 1.0, "decode_tokens": float(size)})
                more.append(_token_seconds(measured) - _token_seconds(simulated))
        return _with(costs, fit_named(rows, more, ("steps", "decode_tokens")))

    async def _with_prompts(self, costs: Costs) -> Costs:
        """How much longer a step is for each prompt in it: by requests of one token."""
        load = self._load(NUM_SHORT, min(SHORT_CONCURRENCY, costs.engine.max_num_seqs), 1)
        measured = (await self._measured(load)).wall_seconds
        more = (measured - load.simulated(costs).wall_seconds) / NUM_SHORT
        return _with(costs, fit_named([{"prompts": 1.0}], [more], ("prompts",)))

    async def _with_requests(self, costs: Costs) -> Costs:
        """How long a lone request is on its way: by its first token."""
        load = self._load(NUM_ALONE, 1, 2)
        measured = median(one.ttft_seconds for one in (await self._measured(load)).records)
        simulated = median(one.ttft_seconds for one in load.simulated(costs).records)
        return msgspec.structs.replace(costs, request_seconds=max(0.0, measured - simulated))

    def _load(self, num_requests: int, concurrency: int, output_tokens: int) -> _Load:
        self._num_loads += 1
        spec = WorkloadSpec(
            seed=self._num_loads,  # each has prompts of its own: none is found in a cache
            num_requests=num_requests,
            input_tokens=PROMPT_TOKENS,
            output_tokens=output_tokens,
            vocab_size=self._vocab_size,
        )
        return _Load(make_workload(spec), concurrency)

    async def _measured(self, load: _Load) -> LoadResult:
        result = await run_load(self._endpoint, load.requests, load.concurrency)
        failed = [record.error for record in result.records if record.error is not None]
        if failed:
            raise ConfigError(f"a request of the calibration failed: {failed[0]}")
        return result


def _with(costs: Costs, more: StepFeatures) -> Costs:
    return msgspec.structs.replace(costs, serving=costs.serving.plus(more))


def _token_seconds(records: Sequence[RequestRecord] | Sequence[SimulatedRequest]) -> float:
    return fmean(record.tpot_seconds or 0.0 for record in records)
