"""A simulation beside the real server, load by load: `python -m benchmarks.simulate.validate`.

Measures what steps cost (or reads --cost), then sends the same workloads to a real server on this
machine and to one simulated replica. Rates and limits follow from the costs alone, before anything
real is seen: rates are shares of what the simulation can do, limits are so many times what a lone
request takes there. Nothing else should run meanwhile.

A shared machine may be faster now than a minute ago. Right before and behind each load runs a
probe, which is like a load that the costs were fitted to: how much longer it takes than they say is
the machine's pace, and the simulation is given it. Its figures without that are written, too. All
loads are gone through several times with other requests, and the medians are compared: beside how
far the simulation is off stands how far the server is from itself.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from benchmarks.common.busy import busy_cores
from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ensure_checkpoint
from lora_serve.bench.client import EVERY_TOKEN, Endpoint, RequestRecord
from lora_serve.bench.goodput import Goodput, Limits
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.load import LoadResult, run_load
from lora_serve.bench.server import lora_serve_command, running_server
from lora_serve.bench.summary import percentile
from lora_serve.bench.workload import TimedRequest, WorkloadSpec, make_workload
from lora_serve.check.adapters import ModelShape, write_adapter
from lora_serve.cli.main import main as lora_serve
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import free_port
from lora_serve.observability.table import text_table
from lora_serve.simulate.costs import Costs, ProcessWork, load_costs
from lora_serve.simulate.features import StepFeatures
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.measured_serving import OUTPUT_TOKENS, PROMPT_TOKENS
from lora_serve.simulate.records import SimulatedRequest

NUM_ADAPTERS = 12
LORA_FLAGS = ("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "6")
TTFT_LIMIT = 4.0  # times a lone request's
TPOT_LIMIT = 3.0
PROBE_CONCURRENCY, PROBE_SECONDS = 4, 2.5
Records = Sequence[RequestRecord] | Sequence[SimulatedRequest]


@dataclass(frozen=True)
class Load:
    """A way to send requests. rate: a second, as a share of what a closed loop of 8 reaches."""

    name: str
    rate: float | None = None
    max_concurrency: int | None = None
    shared_prefix_tokens: int = 0
    has_adapters: bool = False


LOADS = (
    Load("closed loop of 1", max_concurrency=1),
    Load("closed loop of 8", max_concurrency=8),
    Load("Poisson, 50 %", rate=0.5),
    Load("Poisson, 80 %", rate=0.8),
    Load("Poisson, 80 %, a shared prefix", rate=0.8, shared_prefix_tokens=96),
    Load("Poisson, 50 %, 12 adapters", rate=0.5, has_adapters=True),
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one load came to, measured or simulated. Times in milliseconds."""

    goodput: Goodput
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    cached_tokens: int

    @classmethod
    def of(cls, records: Records, limits: Limits, wall_seconds: float) -> Figures:
        ttfts = sorted(1e3 * record.ttft_seconds for record in records)
        tpots = sorted(1e3 * (record.tpot_seconds or 0.0) for record in records)
        return cls(
            goodput=Goodput.of(records, limits, wall_seconds),
            ttft_p50=percentile(ttfts, 0.5),
            ttft_p99=percentile(ttfts, 0.99),
            tpot_p50=percentile(tpots, 0.5),
            cached_tokens=sum(record.cached_tokens for record in records),
        )


@dataclass(frozen=True)
class Round:
    """paces: before and behind the load. as_fitted: simulated as if they were 1."""

    rate: float | None
    paces: tuple[float, float]
    measured: Figures
    simulated: Figures
    as_fitted: Figures


@dataclass
class Compared:
    """One load, gone through several times."""

    load: str
    rounds: list[Round]

    @property
    def errors(self) -> tuple[float, float]:
        return self._errors([each.simulated for each in self.rounds])

    @property
    def errors_as_fitted(self) -> tuple[float, float]:
        return self._errors([each.as_fitted for each in self.rounds])

    def _errors(self, simulated: Sequence[Figures]) -> tuple[float, float]:
        """Medians of the errors of the goodput, and of the median time to the first token."""
        pairs = [(each.measured, one) for each, one in zip(self.rounds, simulated, strict=True)]
        return (
            median(_error(goodput(real), goodput(one)) for real, one in pairs),
            median(_error(real.ttft_p50, one.ttft_p50) for real, one in pairs),
        )


def _error(measured: float, simulated: float) -> float:
    return simulated / measured - 1 if measured else 0.0


def goodput(figures: Figures) -> float:
    return figures.goodput.requests_per_second


class Bench:
    """One model: its costs, its shape of requests, and its server."""

    def __init__(self, costs: Costs, shape: WorkloadSpec, seconds: float) -> None:
        self._costs = costs
        self._shape = shape
        self._seconds = seconds
        engine = msgspec.structs.replace(costs.engine, max_loras=4, max_cpu_loras=6)
        self._engine = engine
        self._num_probes = 0
        lone = self._simulated(self._requests(3, None), 1)
        self.limits = Limits(
            ttft=round(TTFT_LIMIT * 1e3 * lone[-1].ttft_seconds, 1),
            tpot=round(TPOT_LIMIT * 1e3 * (lone[-1].tpot_seconds or 0.0), 1),
        )
        closed = self._simulated(self._requests(64, None), 8)
        self._peak = len(closed) / max(record.last_token for record in closed)

    def workload(self, load: Load, number: int) -> tuple[float | None, tuple[TimedRequest, ...]]:
        rate = None if load.rate is None else load.rate * self._peak
        share = load.rate or (0.4 if load.max_concurrency == 1 else 1.0)
        count = max(12, round(self._seconds * self._peak * share))
        names = tuple(f"adapter-{i}" for i in range(NUM_ADAPTERS)) if load.has_adapters else ()
        return rate, self._requests(
            count,
            rate,
            seed=number,
            shared_prefix_tokens=load.shared_prefix_tokens,
            adapters=names,
            popularity="zipf",
        )

    async def compare(self, load: Load, number: int, endpoint: Endpoint) -> Round:
        rate, requests = self.workload(load, number)
        before = await self.pace(endpoint)
        real = await measured(endpoint, requests, load.max_concurrency)
        paces = before, await self.pace(endpoint)

        def simulated(pace: float) -> Figures:
            records = self._simulated(requests, load.max_concurrency, pace)
            return Figures.of(records, self.limits, max(record.last_token for record in records))

        return Round(
            rate,
            paces,
            Figures.of(real.records, self.limits, real.wall_seconds),
            simulated(fmean(paces)),
            simulated(1.0),
        )

    async def pace(self, endpoint: Endpoint) -> float:
        """How much longer a probe takes now than the costs say."""
        self._num_probes += 1
        spec = WorkloadSpec(
            seed=1000 + self._num_probes,
            input_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            vocab_size=self._shape.vocab_size,
        )
        some = self._simulated(make_workload(spec), PROBE_CONCURRENCY)
        number = round(len(some) * PROBE_SECONDS / max(record.last_token for record in some))
        spec = replace(spec, num_requests=max(PROBE_CONCURRENCY, number))
        requests = make_workload(spec)
        real = await measured(endpoint, requests, PROBE_CONCURRENCY)
        simulated = self._simulated(requests, PROBE_CONCURRENCY)
        return real.wall_seconds / max(record.last_token for record in simulated)

    def _requests(self, count: int, rate: float | None, **more: object) -> tuple[TimedRequest, ...]:
        fields = {name: getattr(self._shape, name) for name in WorkloadSpec.__slots__}
        spec = fields | {"num_requests": count, "request_rate": rate} | more
        return make_workload(WorkloadSpec(**spec))

    def _simulated(
        self, requests: Sequence[TimedRequest], max_concurrency: int | None, pace: float = 1.0
    ) -> tuple[SimulatedRequest, ...]:
        costs = at_pace(self._costs, pace)
        fleet = Fleet(self._engine, costs, 1, max_concurrency=max_concurrency)
        return fleet.run(requests).records


async def measured(
    endpoint: Endpoint, requests: Sequence[TimedRequest], max_concurrency: int | None
) -> LoadResult:
    result = await run_load(endpoint, requests, max_concurrency)
    failed = [record.error for record in result.records if record.error is not None]
    assert not failed, failed[0]
    return result


Seconds = TypeVar("Seconds", StepFeatures, ProcessWork)


def at_pace(costs: Costs, pace: float) -> Costs:
    """The costs of a machine on which everything takes `pace` times as long."""

    def slower(seconds: Seconds) -> Seconds:
        return type(seconds)(**{k: pace * v for k, v in msgspec.structs.asdict(seconds).items()})

    processes = msgspec.structs.replace(
        costs.processes, api=slower(costs.processes.api), client=slower(costs.processes.client)
    )
    return msgspec.structs.replace(
        costs,
        step=slower(costs.step),
        serving=slower(costs.serving),
        processes=processes,
        request_seconds=pace * costs.request_seconds,
        adapter_read_seconds=pace * costs.adapter_read_seconds,
        adapter_prepare_seconds=pace * costs.adapter_prepare_seconds,
    )


async def compare_all(
    bench: Bench, model: Path, only: Sequence[str], num_rounds: int
) -> list[Compared]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with TemporaryDirectory(prefix="lora-serve-validate-") as directory:
        shape = ModelShape.read(model)
        paths = [Path(directory) / f"adapter-{number}" for number in range(NUM_ADAPTERS)]
        for seed, path in enumerate(paths):
            write_adapter(path, shape, str(model), seed, 0.1)
        modules = [f"{path.name}={path}" for path in paths]
        flags = (*LORA_FLAGS, "--served-model-name", "base", "--lora-modules", *modules)
        command = lora_serve_command(str(model), port, flags)
        async with running_server(command, url, Path(directory) / "server.log"):
            endpoint = Endpoint(Origin.parse(url), "base", extra_body=EVERY_TOKEN)
            await measured(endpoint, bench.workload(LOADS[1], 99)[1][:12], 4)
            loads = [each for each in LOADS if not only or any(w in each.name for w in only)]
            found = [Compared(load.name, []) for load in loads]
            for number in range(num_rounds * len(loads)):  # each number has requests of its own
                load, one = loads[number % len(loads)], found[number % len(loads)]
                one.rounds.append(await bench.compare(load, number, endpoint))
                print(row_of(replace(one, rounds=one.rounds[-1:])), file=sys.stderr)
            return found


HEADER = ("load", "pace", "goodput/s", "simulated", "off by", "TTFT p50", "simulated", "off by",
          "TTFT p99", "simulated", "TPOT p50", "simulated")  # fmt: skip


def row_of(one: Compared) -> tuple[str, ...]:
    rounds = one.rounds
    goodput_error, ttft_error = one.errors

    def medians(of: Callable[[Figures], float]) -> tuple[str, str]:
        """What was measured, with its range, and what was simulated."""
        real = sorted(of(each.measured) for each in rounds)
        spread = f" ({real[0]:.4g} to {real[-1]:.4g})" * (len(real) > 1)
        simulated = median(of(each.simulated) for each in rounds)
        return f"{median(real):.4g}{spread}", f"{simulated:.4g}"

    return (
        one.load,
        f"{median(fmean(each.paces) for each in rounds):.2f}",
        *medians(goodput),
        f"{goodput_error:+.1%}",
        *medians(lambda figures: figures.ttft_p50),
        f"{ttft_error:+.1%}",
        *medians(lambda figures: figures.ttft_p99),
        *medians(lambda figures: figures.tpot_p50),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, help="of 0.5B, made if it is not there; else the demo's model"
    )
    parser.add_argument("--cost", type=Path, required=True, help="the cost file; made if missing")
    parser.add_argument("--fit-seconds", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load, about")
    parser.add_argument("--rounds", type=int, default=3, help="how often all loads are sent")
    parser.add_argument("--only", nargs="+", default=[], help="words of the loads to run")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    model = ensure_checkpoint(args.checkpoint) if args.checkpoint else ensure_demo(print).model
    busy = busy_cores(3.0)
    print(f"others keep {busy:.2f} cores busy", file=sys.stderr)
    if not args.cost.exists():
        name = "Qwen2.5-0.5B's shape" if args.checkpoint else "the demo's model"
        fit = ["--output", str(args.cost), "--seconds", str(args.fit_seconds), "--serve-args"]
        words = [*fit, *LORA_FLAGS, "--served-model-name", name]
        assert lora_serve(["simulate", "fit", str(model), *words]) == 0
    costs = load_costs(args.cost)
    shape = (
        WorkloadSpec(input_tokens=96, output_tokens=16, length_spread=0.5)
        if args.checkpoint
        else WorkloadSpec(input_tokens=192, output_tokens=48, length_spread=0.5, vocab_size=300)
    )
    bench = Bench(costs, shape, args.seconds)
    found = asyncio.run(compare_all(bench, model, args.only, args.rounds))
    print(f"{costs.model}: limits of the goodput: {bench.limits}; times in ms")
    print(text_table(HEADER, [row_of(one) for one in found]))
    write_facts(
        args.out, busy_cores_before=busy, limits=bench.limits, costs=costs, loads=found,
        errors={one.load: one.errors for one in found},
        errors_as_fitted={one.load: one.errors_as_fitted for one in found},
    )  # fmt: skip


if __name__ == "__main__":
    main()
