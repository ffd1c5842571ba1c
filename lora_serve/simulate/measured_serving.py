"""What serving costs beside the engine's own steps: a real server under known loads.

What the API process and the client work is read off their processor time, and shared out among
requests, prompts' tokens, steps and tokens. What is left, such as which part of a request's work
comes before its first token, is found by simulating the loads: they are to take what they took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import msgspec
import numpy as np

from lora_serve.bench.client import Endpoint, RequestRecord
from lora_serve.bench.load import LoadResult, run_load
from lora_serve.bench.workload import TimedRequest, WorkloadSpec, make_workload
from lora_serve.errors import ConfigError
from lora_serve.simulate.costs import Costs, ProcessWork
from lora_serve.simulate.features import StepFeatures
from lora_serve.simulate.fit import Array, fit_by_simulation, least_squares
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.records import Simulated, SimulatedRequest

BATCHES = (1, 2, 4, 8, 16)
PROMPT_TOKENS, LONG_PROMPT_TOKENS = 32, 256
OUTPUT_TOKENS = 24
SHORT_CONCURRENCY = 8  # of requests of one token, which show what a request costs
LOAD_SECONDS = 1.5  # of each load, about, but from so many requests to so many:
LEAST_REQUESTS, MOST_REQUESTS = 8, 64  # more would take long to simulate so often
SLOWER_DOUBT = 0.1
MOST_TIMES = 3.0  # the median: requests that take longer were held up, and count as so long


@dataclass(frozen=True, slots=True)
class _Load:
    """Requests that are all due at once, and how many of them may run."""

    requests: tuple[TimedRequest, ...]
    concurrency: int

    def simulated(self, costs: Costs) -> Simulated:
        fleet = Fleet(costs.engine, costs, 1, max_concurrency=self.concurrency)
        return fleet.run(self.requests)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A load, what came of it, and what the API process worked meanwhile."""

    load: _Load
    result: LoadResult
    api_seconds: float


@dataclass(frozen=True, slots=True)
class Unknowns:
    """What is found by simulations: all of it at least 0, and seconds but for `slower`.

    slower: as what share of its time a step takes longer in a server than alone. steps,
    decode_tokens, prompts: that a step takes longer for each. begin, first, end: parts of a
    request's work. way: what a request is on its way.
    """

    slower: float = 0.0
    steps: float = 0.0
    decode_tokens: float = 0.0
    prompts: float = 0.0
    begin: float = 0.0
    first: float = 0.0
    end: float = 0.0
    way: float = 0.0

    def put_into(self, costs: Costs) -> Costs:
        """The costs with them. Both processes' works for a request stay in their proportion."""
        api, client = costs.processes.api, costs.processes.client
        known = _request_work(api) + _request_work(client)
        share = _request_work(api) / known if known else 1.0

        def work(process: ProcessWork, share: float) -> ProcessWork:
            begin, first, end = (share * part for part in (self.begin, self.first, self.end))
            return msgspec.structs.replace(process, begin=begin, first=first, end=end)

        return msgspec.structs.replace(
            costs,
            ratios={
                kind: tuple((1.0 + self.slower) * ratio for ratio in ratios)
                for kind, ratios in costs.ratios.items()
            },
            serving=StepFeatures(
                steps=self.steps, decode_tokens=self.decode_tokens, prompts=self.prompts
            ),
            processes=msgspec.structs.replace(
                costs.processes, api=work(api, share), client=work(client, 1.0 - share)
            ),
            request_seconds=self.way,
        )


class ServingFit:
    """Loads on the server at `endpoint`, whose model has a vocabulary of vocab_size tokens.

    api_seconds: processor time of its API process so far.
    """

    def __init__(
        self, endpoint: Endpoint, vocab_size: int, api_seconds: Callable[[], float]
    ) -> None:
        self._endpoint = endpoint
        self._vocab_size = vocab_size
        self._api_seconds = api_seconds
        self._num_loads = 0

    async def fit(self, costs: Costs) -> Costs:
        """The costs with all that this server and its client add.

        Raises:
            ConfigError: a request failed.
        """
        limit, longest = costs.engine.max_num_seqs, costs.engine.max_model_len // 2
        await self._measured(costs, 2, PROMPT_TOKENS, OUTPUT_TOKENS)  # the first ones are slower
        loads = [(size, PROMPT_TOKENS, OUTPUT_TOKENS) for size in BATCHES if size <= limit]
        for num_tokens in (PROMPT_TOKENS, min(LONG_PROMPT_TOKENS, longest)):
            loads.append((min(SHORT_CONCURRENCY, limit), num_tokens, 1))
        loads.append((1, PROMPT_TOKENS, 2))
        measured = [await self._measured(costs, *load) for load in loads]
        return fit_loads(costs, measured)

    async def _measured(
        self, costs: Costs, concurrency: int, prompt_tokens: int, output_tokens: int
    ) -> _Measured:
        load = self._load(LEAST_REQUESTS, concurrency, prompt_tokens, output_tokens)
        seconds = load.simulated(costs).wall_seconds
        number = min(MOST_REQUESTS, round(LEAST_REQUESTS * LOAD_SECONDS / seconds))
        number = max(LEAST_REQUESTS, 2 * concurrency, number)
        load = self._load(number, concurrency, prompt_tokens, output_tokens)
        before = self._api_seconds()
        result = await run_load(self._endpoint, load.requests, load.concurrency)
        failed = [record.error for record in result.records if record.error is not None]
        if failed:
            raise ConfigError(f"a request of the calibration failed: {failed[0]}")
        return _Measured(load, result, self._api_seconds() - before)

    def _load(
        self, num_requests: int, concurrency: int, prompt_tokens: int, output_tokens: int
    ) -> _Load:
        self._num_loads += 1
        spec = WorkloadSpec(
            seed=self._num_loads,  # each has prompts of its own: none is found in a cache
            num_requests=num_requests,
            input_tokens=prompt_tokens,
            output_tokens=output_tokens,
            vocab_size=self._vocab_size,
        )
        return _Load(make_workload(spec), concurrency)


def fit_loads(costs: Costs, measured: Sequence[_Measured]) -> Costs:
    """The costs with which simulations of these loads take what the loads took."""
    # The mean of each kind of steps: a few requests would draw too few deviations.
    steady = {kind: (ratio,) for kind, ratio in costs.mean_ratios.items()}
    costs = _with_processes(costs, measured)
    known = msgspec.structs.replace(costs, ratios=steady)
    work = _request_work(known.processes.api) + _request_work(known.processes.client)
    lone = fmean(_usual([record.ttft_seconds for record in measured[-1].result.records]))
    start = Unknowns(begin=work / 2, first=work / 4, end=work / 4)
    part = max(work / 4, lone / 1000)
    doubts = Unknowns(SLOWER_DOUBT, lone / 20, lone / 100, lone / 10, part, part, part, lone / 20)

    def simulate(unknowns: Array) -> Array:
        found = Unknowns(*map(float, unknowns)).put_into(known)
        figures = []
        for one in measured:
            result = one.load.simulated(found)
            figures += _figures(result.records, result.wall_seconds)
        return np.array(figures)

    figures = [f for one in measured for f in _figures(one.result.records, one.result.wall_seconds)]
    found = fit_by_simulation(
        simulate,
        np.array(figures),
        np.array(_values(start)),
        np.array(_values(doubts)),
    )
    return Unknowns(*map(float, found)).put_into(costs)


def _values(unknowns: Unknowns) -> list[float]:
    return [getattr(unknowns, name) for name in Unknowns.__slots__]


def _request_work(process: ProcessWork) -> float:
    return process.begin + process.first + process.end


def _figures(
    records: Sequence[RequestRecord] | Sequence[SimulatedRequest], wall_seconds: float
) -> list[float]:
    """What a load is compared by: times to the first and to the last token, and of all requests."""
    whole = [record.e2e_seconds for record in records]
    usual = fmean(_usual(whole))
    return [
        fmean(_usual([record.ttft_seconds for record in records])),
        usual,
        wall_seconds / len(records) * usual / fmean(whole),
    ]


def _usual(seconds: Sequence[float]) -> list[float]:
    most = MOST_TIMES * median(seconds)
    return [min(most, each) for each in seconds]


def _with_processes(costs: Costs, measured: Sequence[_Measured]) -> Costs:
    """What the API process and the client work for each request, token and step."""
    counts = [
        (
            len(one.load.requests),
            sum(len(request.prompt_token_ids) for request in one.load.requests),
            one.load.simulated(costs).totals.num_steps,
            sum(request.max_tokens for request in one.load.requests),
        )
        for one in measured
    ]

    def work(seconds: Sequence[float]) -> ProcessWork:
        found = least_squares(np.array(counts, float), np.maximum(seconds, 1e-9))
        request, prompt_token, message, token = map(float, found)
        return ProcessWork(begin=request, prompt_token=prompt_token, message=message, token=token)

    processes = msgspec.structs.replace(
        costs.processes,
        api=work([one.api_seconds for one in measured]),
        client=work([one.result.client_cpu_seconds for one in measured]),
    )
    return msgspec.structs.replace(costs, processes=processes)
