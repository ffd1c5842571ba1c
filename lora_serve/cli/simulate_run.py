"""A run of `lora-serve simulate`: one simulation for each combination that was asked for."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import msgspec

from lora_serve.bench.goodput import Limits
from lora_serve.bench.workload import (
    CLOSED_LOOP_CONCURRENCY,
    TimedRequest,
    WorkloadSpec,
    draw_requests,
    make_workload,
)
from lora_serve.bench.workload_file import load_workload, save_workload
from lora_serve.cli.bench_run import workload_spec
from lora_serve.errors import ConfigError
from lora_serve.simulate.costs import Costs, EngineSettings, load_costs
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.report import Choice, Report, Row, report_json, report_text
from lora_serve.simulate.rollout import RollOut
from lora_serve.simulate.sizing import least_replicas, smallest

EXIT_FAILED_REQUESTS = 1
MOST_REPLICAS, MOST_ADAPTERS = 100_000, 10_000_000  # all of them are kept in memory


@contextmanager
def _no_collector() -> Iterator[None]:
    """A simulation makes no cycles, and the collector would walk over all that it makes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_simulate(args: argparse.Namespace) -> int:
    """Simulate, and print the table. 1 if any request failed, so that scripts notice."""
    if args.cost is None:
        raise ConfigError(
            "--cost FILE is missing; `lora-serve simulate fit --output FILE` measures this machine"
        )
    question = _Question(args, load_costs(args.cost))
    with _no_collector():
        rows = question.answer()
    report = Report(
        costs=question.costs,
        engine=question.engine,
        workload=question.spec if args.workload is None else str(args.workload),
        max_concurrency=args.max_concurrency,
        limits=question.limits,
        attainment=args.attainment if args.find_replicas else None,
        rows=rows,
    )
    print(report_text(report))
    if args.find_replicas:
        for row in rows:
            print(_found_line(row, args.attainment))
    if args.json:
        args.json.write_bytes(report_json(report))
    return EXIT_FAILED_REQUESTS if any(row.num_failed for row in rows) else 0


def numbers(flag: str, text: str, most: int) -> tuple[int, ...]:
    """Read 4, 1,2,4 or 1-4. Raises ConfigError for what is none, or not from 1 to `most`."""
    found: list[int] = []
    for part in text.split(","):
        first, is_range, last = part.partition("-")
        try:
            low, high = int(first), int(last if is_range else first)
        except ValueError:
            low, high = 0, 0
        if not 1 <= low <= high:
            raise ConfigError(
                f"{flag} {text}: want a number of at least 1, or several as 1,2,4 or 1-4"
            )
        if high > most:
            raise ConfigError(f"{flag} {text}: {high} must be at most {most}")
        found += range(low, high + 1)
    return tuple(found)


@dataclass
class _Question:
    """What the flags ask, checked before anything is simulated."""

    args: argparse.Namespace
    costs: Costs

    def __post_init__(self) -> None:
        args = self.args
        self.limits = Limits.parse(args.goodput)
        self.roll_outs = [RollOut.parse(text) for text in args.roll_out]
        self.replicas = numbers("--replicas", args.replicas, MOST_REPLICAS)
        self.engine = _engine(args, self.costs.engine)
        self.adapters = (
            (self.engine.max_cpu_loras,)
            if args.adapters_per_replica is None
            else numbers("--adapters-per-replica", args.adapters_per_replica, MOST_ADAPTERS)
        )
        if args.max_concurrency is not None and args.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {args.max_concurrency} must be at least 1")
        if not 0 < args.attainment <= 1:
            raise ConfigError(f"--attainment {args.attainment} must be above 0 and at most 1")
        if args.find_replicas and not args.goodput:
            raise ConfigError("--find-replicas needs --goodput, such as --goodput ttft:500 tpot:50")
        if args.num_adapters and args.adapters:
            raise ConfigError("--num-adapters and --adapters both name adapters; leave one out")
        if not 0 <= args.num_adapters <= MOST_ADAPTERS:
            raise ConfigError(
                f"--num-adapters {args.num_adapters} must be at least 0 and at most {MOST_ADAPTERS}"
            )
        if not 1 <= args.max_replicas <= MOST_REPLICAS:
            raise ConfigError(
                f"--max-replicas {args.max_replicas} must be at least 1 and at most {MOST_REPLICAS}"
            )
        if self.roll_outs and args.workload is None:
            unknown = {each.name for each in self.roll_outs}.difference(self.spec.adapters)
            if unknown:
                raise ConfigError(
                    f"--roll-out {', '.join(sorted(unknown))}: no request asks for it; name "
                    "adapters by --adapters, or adapter-0 and so on of --num-adapters"
                )
        if args.save_workload:
            save_workload(make_workload(self.spec), args.save_workload)

    @cached_property
    def spec(self) -> WorkloadSpec:
        names = self.args.adapters or [f"adapter-{i}" for i in range(self.args.num_adapters)]
        return workload_spec(self.args, names)

    @cached_property
    def _from_file(self) -> tuple[TimedRequest, ...]:
        return load_workload(self.args.workload)

    def requests(self) -> Iterable[TimedRequest]:
        """The workload from its beginning; drawn anew each time, since it may be long."""
        return draw_requests(self.spec) if self.args.workload is None else self._from_file

    def answer(self) -> tuple[Row, ...]:
        choices = [(policy, adapters) for policy in self.args.policy for adapters in self.adapters]
        if self.args.find_replicas:
            return tuple(self._found(policy, adapters) for policy, adapters in choices)
        return tuple(
            self._row(Choice(number, policy, adapters))
            for policy, adapters in choices
            for number in self.replicas
        )

    def _found(self, policy: str, adapters: int) -> Row:
        rows: dict[int, Row] = {}

        def is_enough(number: int) -> bool:
            rows[number] = self._row(Choice(number, policy, adapters))
            return rows[number].goodput.share >= float(self.args.attainment)

        return rows[smallest(is_enough, self.args.max_replicas, self._least)]

    @cached_property
    def _least(self) -> int:
        """Fewer replicas cannot keep up with the requests; 1 where these wait for each other."""
        if self.args.max_concurrency is not None or not self._has_times:
            return 1
        attainment, seconds_of = float(self.args.attainment), self.costs.least_seconds_of
        needed = least_replicas(self.requests(), seconds_of, self.engine, self.limits, attainment)
        return min(needed, int(self.args.max_replicas))

    def _row(self, choice: Choice) -> Row:
        begin = time.process_time()
        engine = with_adapters(self.engine, choice.adapters_per_replica)
        concurrency = self._concurrency(choice.num_replicas)
        fleet = Fleet(
            engine,
            self.costs,
            choice.num_replicas,
            choice.policy,
            concurrency,
            self.roll_outs,
            self.args.seed,
        )
        row = Row.of(choice, fleet.run(self.requests()), self.limits)
        print(
            f"{choice.num_replicas} replicas, {choice.policy}, {choice.adapters_per_replica} "
            f"adapters each: {row.goodput.share:.1%} of {row.num_requests} requests within limits; "
            f"simulated {row.wall_seconds:,.0f} s in {time.process_time() - begin:.1f} s",
            file=sys.stderr,
        )
        return row

    def _concurrency(self, num_replicas: int) -> int | None:
        limit: int | None = self.args.max_concurrency
        if limit is None and not self._has_times:
            return CLOSED_LOOP_CONCURRENCY * num_replicas
        return limit

    @property
    def _has_times(self) -> bool:
        return self.args.request_rate is not None or self.args.workload is not None


def with_adapters(engine: EngineSettings, number: int) -> EngineSettings:
    """A step holds no more adapters than memory does."""
    return msgspec.structs.replace(
        engine, max_cpu_loras=number, max_loras=min(number, engine.max_loras)
    )


def _engine(args: argparse.Namespace, engine: EngineSettings) -> EngineSettings:
    asked = {
        "max_loras": args.max_loras,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len,
        "num_blocks": args.num_gpu_blocks_override,
        "enable_prefix_caching": args.enable_prefix_caching,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        if value is not True and value is not False and value < 1:
            flag = "num-gpu-blocks-override" if name == "num_blocks" else name.replace("_", "-")
            raise ConfigError(f"--{flag} {value} must be at least 1")
    return msgspec.structs.replace(engine, **given)


def _found_line(row: Row, attainment: float) -> str:
    choice = row.choice
    return (
        f"{choice.policy}, {choice.adapters_per_replica} adapters a replica: "
        f"{choice.num_replicas} replicas keep {attainment:.1%} of the requests within the limits"
    )
