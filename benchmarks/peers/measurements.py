"""Measuring an engine: a workload, the rows of the table that its runs give, and a run's turns.

A phase is a server, or some, and the measurements made on them. A measurement repeats, each time
with a new seed, so that no prompt was seen before; its figure is the median. Measurements that
are compared make a round: they take turns, as engines do.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from benchmarks.common.limits import MachineLimits
from lora_serve.bench.client import Endpoint, send
from lora_serve.bench.load import run_load
from lora_serve.bench.summary import RunSummary, summarize
from lora_serve.bench.workload import WorkloadSpec, make_workload

Unit = Literal["tok/s", "ms"]
Need = Literal["batching", "adapter_batching", "adapters", "many_adapters", "int8", "int4"]

RUNNING = 8
REPEATS = 5
PATIENCE_SECONDS = 25.0  # no further repeat once a measurement has taken this long
RUN_SECONDS = 200.0  # an engine that needs longer for one run is reported as too slow for it
WARMUP_SEED = 9_999


@dataclass(frozen=True, slots=True)
class Figure:
    """value: the median of the repeats' `values`. Make one with `figure_of`."""

    value: float
    values: tuple[float, ...]


def figure_of(values: Sequence[float]) -> Figure:
    return Figure(statistics.median(values), tuple(values))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. tok/s is better high, ms is better low.

    limit: the best that the machine allows, in the row's unit, where that follows from its limits.
    """

    key: str
    title: str
    unit: Unit
    figure: Callable[[RunSummary], float]
    limit: Callable[[MachineLimits], float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload and the rows that its runs give. needs: what an engine must be able to do.

    server: on which of the phase's. new_prefixes: whether each repeat has shared prefixes of its
    own; if not, all repeats have those of the first.
    """

    spec: WorkloadSpec
    max_concurrency: int
    rows: tuple[Row, ...]
    needs: tuple[Need, ...] = ()
    server: int = 0
    new_prefixes: bool = True
    warm_up: bool = True
    run_seconds: float = RUN_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """rounds: one after another; the measurements of one take turns. needs: or it is left out.

    num_adapters: how many each of the phase's servers has; all of small_adapters' kind.
    quantize_activations: where that is a choice; llama.cpp and OpenVINO do so in every such phase.
    max_running, max_model_len: of the deployment.
    is_of_ours: compares lora-serve with itself; others are not asked.
    """

    name: str
    num_adapters: tuple[int, ...] = (0,)
    small_adapters: bool = False
    quantization: str = ""
    quantize_activations: bool = False
    max_running: int = RUNNING
    max_model_len: int = 2048
    is_of_ours: bool = False
    needs: tuple[Need, ...] = ()
    rounds: tuple[tuple[Measurement, ...], ...]

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return tuple(chain.from_iterable(self.rounds))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its rows."""
        return tuple(row.key for measurement in self.measurements for row in measurement.rows)


class MeasurementFailedError(Exception):
    """Requests failed; a figure from the others would mean nothing."""


class Turns:
    """One measurement on one engine, run by run, so that engines can take turns."""

    def __init__(self, endpoint: Endpoint, measurement: Measurement) -> None:
        self._endpoint = endpoint
        self._measurement = measurement
        self._summaries: list[RunSummary] = []
        self._seconds = 0.0

    @property
    def is_done(self) -> bool:
        return len(self._summaries) == REPEATS or self._seconds >= PATIENCE_SECONDS

    async def take(self) -> None:
        """One more run. Raises MeasurementFailedError with the first error."""
        measurement, number = self._measurement, len(self._summaries)
        if measurement.warm_up and not number:
            await _run(self._endpoint, measurement, _warmup(measurement.spec))
        start = time.monotonic()
        spec = _repeat(measurement, number)
        self._summaries.append(await _run(self._endpoint, measurement, spec))
        self._seconds += time.monotonic() - start

    def figures(self) -> dict[str, Figure]:
        """Figures by their row's key, after one turn at least."""
        return {
            row.key: figure_of([row.figure(summary) for summary in self._summaries])
            for row in self._measurement.rows
        }


async def measure(endpoint: Endpoint, measurement: Measurement) -> dict[str, Figure]:
    """All turns on one engine. Raises MeasurementFailedError with the first error."""
    turns = Turns(endpoint, measurement)
    while not turns.is_done:
        await turns.take()
    return turns.figures()


async def adapter_changes_answers(endpoint: Endpoint, adapter: str) -> bool:
    """Whether an adapter is applied at all: some engines accept one and answer as the base."""
    spec = WorkloadSpec(seed=WARMUP_SEED, num_requests=1, input_tokens=24, output_tokens=12)
    (plain,) = make_workload(spec)
    base = await send(endpoint, plain, time.perf_counter())
    adapted = await send(endpoint, replace(plain, adapter=adapter), time.perf_counter())
    for record in (base, adapted):
        if record.error:
            raise MeasurementFailedError(record.error)
    return base.text != adapted.text


def _repeat(measurement: Measurement, number: int) -> WorkloadSpec:
    spec = measurement.spec
    prefix_seed = spec.prefix_seed
    if prefix_seed is not None and measurement.new_prefixes:
        prefix_seed += number
    return replace(spec, seed=spec.seed + number, prefix_seed=prefix_seed)


def _warmup(spec: WorkloadSpec) -> WorkloadSpec:
    """A load as long and as wide as what follows, of other prompts and fewer tokens."""
    tokens = min(4, spec.output_tokens)
    count = min(RUNNING, spec.num_requests)
    return replace(spec, seed=WARMUP_SEED, prefix_seed=None, num_requests=count,
                   output_tokens=tokens)  # fmt: skip


async def _run(endpoint: Endpoint, measurement: Measurement, spec: WorkloadSpec) -> RunSummary:
    requests = make_workload(spec)
    try:
        async with asyncio.timeout(measurement.run_seconds):
            result = await run_load(endpoint, requests, measurement.max_concurrency)
    except TimeoutError as error:
        raise MeasurementFailedError(f"not done after {measurement.run_seconds:g} s") from error
    summary = summarize(result)
    for error in summary.errors:
        raise MeasurementFailedError(error)
    return summary
