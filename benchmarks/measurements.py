"""What is measured on every engine, and which figure each run gives.

A phase is a server, or some, and the measurements made on them. A measurement repeats, each time
with a new seed, so that no prompt was seen before; its figure is the median. Measurements that
are compared make a round: they take turns, as engines do.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from benchmarks.limits import MachineLimits, step_bytes
from benchmarks.make_checkpoint import QWEN_0_5B
from lora_serve.bench.client import Endpoint, send
from lora_serve.bench.load import run_load
from lora_serve.bench.summary import RunSummary, Spread, summarize
from lora_serve.bench.workload import WorkloadSpec, make_workload
from lora_serve.ops.quantization import FORMATS, CodeFormat

Unit = Literal["tok/s", "ms"]
Need = Literal["batching", "adapter_batching", "adapters", "many_adapters", "int8", "int4"]

RUNNING = 8
REPEATS = 5
PATIENCE_SECONDS = 25.0  # no further repeat once a measurement has taken this long
RUN_SECONDS = 200.0  # an engine that needs longer for one run is told to be too slow for it
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
    is_of_ours: compares lora-serve with itself; others are not asked.
    """

    name: str
    num_adapters: tuple[int, ...] = (0,)
    small_adapters: bool = False
    quantization: str = ""
    quantize_activations: bool = False
    is_of_ours: bool = False
    needs: tuple[Need, ...] = ()
    rounds: tuple[tuple[Measurement, ...], ...]

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return tuple(chain.from_iterable(self.rounds))

    @property
    def keys(self) -> tuple[str, ...]:
        """Of its rows."""
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
        """By their row's key, after one turn at least."""
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
    """As long and as wide as what follows, with other prompts and fewer tokens to generate."""
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


def _tokens_per_second(summary: RunSummary) -> float:
    return summary.total.output_tokens_per_second


def _prefill_rate(summary: RunSummary) -> float:
    """Prompt tokens over the time to the first token: what a waiting user sees of prefill."""
    ttft = summary.total.ttft
    assert ttft is not None, "no request failed, so each has a first token"
    return summary.total.prompt_tokens / summary.total.num_requests / (ttft.p50 / 1e3)


def _step_ms(summary: RunSummary) -> float:
    """The median gap between tokens; a request's share of bundled ones."""
    itl: Spread | None = summary.total.itl
    assert itl is not None, "every decode workload generates more than one token"
    return itl.p50 / summary.total.tokens_per_event


def _prefill(
    key: str, what: str, adapters: tuple[str, ...] = (), in_bf16: bool = True
) -> Measurement:
    """in_bf16: whether its products are, whatever the weights are kept in."""
    spec = WorkloadSpec(
        seed=_seed(key), num_requests=1, input_tokens=1024, output_tokens=1, adapters=adapters
    )

    def limit(machine: MachineLimits) -> float:
        return 1024 / machine.prefill_seconds(QWEN_0_5B, 1024, bool(adapters))

    title = f"prefill of 1,024 tokens, 1 request{what}"
    row = Row(key, title, "tok/s", _prefill_rate, limit if in_bf16 else None)
    return Measurement(spec=spec, max_concurrency=1, rows=(row,))


def _decode(
    key: str,
    what: str,
    running: int,
    adapters: tuple[str, ...] = (),
    needs: tuple[Need, ...] = (),
    code_format: CodeFormat | None = None,
) -> Measurement:
    spec = WorkloadSpec(
        seed=_seed(key), num_requests=running, input_tokens=32, output_tokens=64, adapters=adapters,
        popularity="round-robin",
    )  # fmt: skip

    def limit(machine: MachineLimits) -> float:
        return 1e3 * machine.step_seconds(step_bytes(QWEN_0_5B, code_format, len(adapters)))

    requests = "1 request" if running == 1 else f"{running} requests"
    row = Row(key, f"decode step, {requests}{what}", "ms", _step_ms, limit)
    return Measurement(spec=spec, max_concurrency=running, rows=(row,), needs=needs)


def _decode_8(key: str, what: str, adapters: tuple[str, ...]) -> Measurement:
    return _decode(key, what, RUNNING, adapters, ("adapter_batching",))


def _quantized(
    kind: str, what: str, running: int | None = None
) -> tuple[tuple[Measurement, ...], ...]:
    """The rounds of a phase in fewer bits; `running`: how many decode at once, if any do."""
    weights, _, activations = kind.partition("-")
    code_format = FORMATS[weights]
    prefill = _prefill(f"{kind}-prefill", what, in_bf16=not activations)
    alone = (prefill,), (_decode(f"{kind}-decode-1", what, 1, code_format=code_format),)
    if running is None:
        return alone
    key = f"{kind}-decode-{running}"
    together = _decode(key, f" at once{what}", running, (), ("batching",), code_format)
    return *alone, (together,)


def _closed_loop() -> Measurement:
    key = "closed-loop"
    spec = WorkloadSpec(seed=_seed(key), num_requests=16, input_tokens=128, output_tokens=64)
    title = "16 requests, 8 at a time, 128 in, 64 out"

    def limit(machine: MachineLimits) -> float:
        prompts = 16 * machine.prefill_seconds(QWEN_0_5B, 128, False)
        steps = 2 * 63 * machine.step_seconds(step_bytes(QWEN_0_5B, None, 0))
        return 16 * 64 / (prompts + steps)

    rate = Row(key, title, "tok/s", _tokens_per_second, limit)
    return Measurement(spec=spec, max_concurrency=RUNNING, rows=(rate,))


def _four_adapters(temperature: str, seed: int) -> Measurement:
    """Cold and hot differ by the seed of own tokens; the prefixes of hot are those of cold.

    Of its first run, which every engine has made.
    """
    spec = WorkloadSpec(
        seed=seed, prefix_seed=400, num_requests=16, shared_prefix_tokens=512, input_tokens=64,
        output_tokens=32, adapters=names("r16", 4), popularity="round-robin",
    )  # fmt: skip
    title = f"4 adapters, 16 requests, 8 at a time, 512 shared + 64 in, 32 out, {temperature}"
    row = Row(f"four-{temperature}", title, "tok/s", _tokens_per_second)
    is_cold = temperature == "cold"
    return Measurement(
        spec=spec, max_concurrency=RUNNING, rows=(row,), warm_up=is_cold, new_prefixes=is_cold
    )


def _zipf(server: int, count: int) -> Measurement:
    key = f"zipf-{count}"
    spec = WorkloadSpec(
        seed=_seed(key), num_requests=48, input_tokens=64, output_tokens=32,
        adapters=names("r8", count), popularity="zipf",
    )  # fmt: skip
    title = f"{count:,} adapters registered, Zipf, 48 requests, 8 at a time, 64 in, 32 out"
    row = Row(key, title, "tok/s", _tokens_per_second)
    return Measurement(spec=spec, max_concurrency=RUNNING, rows=(row,), server=server)


def _seed(key: str) -> int:
    """Another one for every measurement, so that no two on one server share a prompt."""
    return zlib.crc32(key.encode())


def names(kind: str, count: int) -> tuple[str, ...]:
    """The adapters' names, as make_checkpoint gives them."""
    return tuple(f"{kind}-{number}" for number in range(count))


ONE = names("r16", 1)
MANY = (4, 1000)
PHASES = (
    Phase(
        name="base",
        rounds=(
            (_prefill("prefill", ""),),
            (_decode("decode-1", "", 1),),
            (_decode("decode-8", " at once", RUNNING, needs=("batching",)),),
            (_closed_loop(),),
        ),
    ),
    Phase(
        name="adapters",
        num_adapters=(8,),
        needs=("adapters",),
        rounds=(
            (
                _prefill("prefill-base", ", none of 8 adapters"),
                _prefill("prefill-adapter", ", one adapter", ONE),
            ),
            (
                _decode("decode-base", ", none of 8 adapters", 1),
                _decode("decode-adapter", ", one adapter", 1, ONE),
            ),
            (
                _decode_8("decode-8-base", " at once, none of 8 adapters", ()),
                _decode_8("decode-8-of-1", " at once, all of one adapter", ONE),
                _decode_8("decode-8-of-8", " at once, of 8 adapters", names("r16", 8)),
            ),
            (_four_adapters("cold", 400),),
            (_four_adapters("hot", 450),),
        ),
    ),
    Phase(
        name="zipf",
        num_adapters=MANY,
        small_adapters=True,
        is_of_ours=True,
        needs=("many_adapters",),
        rounds=(tuple(_zipf(server, count) for server, count in enumerate(MANY)),),
    ),
    Phase(
        name="int8",
        quantization="int8",
        needs=("int8",),
        rounds=_quantized("int8", ", int8 weights", RUNNING),
    ),
    Phase(
        name="int8-activations",
        quantization="int8",
        quantize_activations=True,
        needs=("int8",),
        rounds=_quantized("int8-activations", ", int8 weights and activations", RUNNING),
    ),
    Phase(
        name="int4",
        quantization="int4",
        needs=("int4",),
        rounds=_quantized("int4", ", int4 weights"),
    ),
)
