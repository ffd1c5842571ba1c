"""What large fleets do, simulated: `python -m benchmarks.simulate.scale --cost FILE`.

Writes benchmarks/results/scale.json, the pictures in docs/, and the tables of docs/scale.md between
their markers. All but the seconds of the last table follow from the cost file and the seed: they
are the same on every machine, whatever else it does.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill

import msgspec

from benchmarks.common.facts import write_facts
from lora_serve.bench.goodput import Limits
from lora_serve.bench.plots import plot_lines
from lora_serve.bench.workload import TimedRequest, WorkloadSpec, draw_requests
from lora_serve.fleet.routing import POLICIES
from lora_serve.simulate.costs import Costs, load_costs
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.report import Choice, Row
from lora_serve.simulate.rollout import RollOut
from lora_serve.simulate.sizing import smallest

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"
LIMITS_TIMES = (6.0, 10.0)  # of a lone request's first token and time a token
ADAPTERS_PER_REPLICA = 32
RATE = 0.25  # of what as many replicas answer where all prefixes are cached
PREFIX, INPUT, OUTPUT = 192, 48, 12
MEDIUM, ADAPTERS = 100, (100, 1_000, 10_000)
LARGE, LARGE_ADAPTERS = 1_000, 100_000
MEMORIES = (8, 16, 64, 128)
NEEDED_ADAPTERS, NEEDED_REQUESTS = (100, 1_000), 1_000
LARGE_RUNS = ((1, "affinity"), (2, "affinity"), (4, "affinity"), (4, "least-loaded"),
              (4, "round-robin"))  # fmt: skip


@dataclass(frozen=True)
class Lab:
    """The cost file, and what follows from it alone: limits, and what one replica answers."""

    costs: Costs

    @cached_property
    def limits(self) -> Limits:
        record = (
            self._fleet(1, None).run([TimedRequest((1,) * (PREFIX + INPUT), OUTPUT)]).records[0]
        )
        ttft, tpot = LIMITS_TIMES
        return Limits(
            ttft=round(1e3 * ttft * record.ttft_seconds),
            tpot=round(1e3 * tpot * (record.tpot_seconds or 0.0)),
        )

    @cached_property
    def peak(self) -> float:
        """Requests a second of one replica with one adapter in a closed loop of 8."""
        requests = self.requests(num_requests=200, num_adapters=1, rate=None)
        return 200 / self._fleet(1, 8).run(requests).wall_seconds

    def requests(
        self, num_requests: int, num_adapters: int, rate: float | None
    ) -> Iterable[TimedRequest]:
        """Adapters by Zipf's law; the prompts of each begin with one of four prefixes."""
        spec = WorkloadSpec(
            num_requests=num_requests,
            input_tokens=INPUT,
            output_tokens=OUTPUT,
            shared_prefix_tokens=PREFIX,
            num_prefixes=4,
            length_spread=0.5,
            adapters=tuple(f"adapter-{i}" for i in range(num_adapters)),
            popularity="zipf",
            zipf_exponent=0.8,
            request_rate=rate,
        )
        return draw_requests(spec)

    def row(
        self,
        num_replicas: int,
        policy: str,
        requests: Iterable[TimedRequest],
        adapters_per_replica: int = ADAPTERS_PER_REPLICA,
        roll_outs: Sequence[RollOut] = (),
    ) -> Row:
        fleet = self._fleet(num_replicas, None, policy, adapters_per_replica, roll_outs)
        choice = Choice(num_replicas, policy, adapters_per_replica)
        return Row.of(choice, fleet.run(requests), self.limits)

    def _fleet(
        self,
        num_replicas: int,
        max_concurrency: int | None,
        policy: str = "affinity",
        adapters_per_replica: int = ADAPTERS_PER_REPLICA,
        roll_outs: Sequence[RollOut] = (),
    ) -> Fleet:
        engine = msgspec.structs.replace(
            self.costs.engine,
            num_blocks=min(1024, self.costs.engine.num_blocks),
            max_loras=min(8, adapters_per_replica),
            max_cpu_loras=adapters_per_replica,
        )
        return Fleet(engine, self.costs, num_replicas, policy, max_concurrency, roll_outs)


@dataclass(frozen=True)
class Grown:
    """One row of a table: what was varied, and what came of it."""

    varied: int
    row: Row


@dataclass(frozen=True)
class Needed:
    policy: str
    num_adapters: int
    num_replicas: int


@dataclass(frozen=True)
class Timed:
    """cpu_seconds: what the simulation itself took."""

    num_requests: int
    num_events: int
    num_steps: int
    cpu_seconds: float


@dataclass(frozen=True)
class Found:
    """policies, memory: of MEDIUM replicas. large, timed: of LARGE ones."""

    policies: list[Grown]
    memory: list[Grown]
    needed: list[Needed]
    roll_outs: list[Grown]
    large: list[Grown]
    timed: list[Timed]


def explore(lab: Lab, num_requests: int, num_workers: int) -> Found:
    """Simulate in so many processes at a time, the longest first."""
    with ProcessPoolExecutor(num_workers) as pool:
        large = [
            (times, pool.submit(simulate, lab, Run(LARGE, policy, times * num_requests,
                                                   LARGE_ADAPTERS)))
            for times, policy in LARGE_RUNS
        ]  # fmt: skip
        needed = [
            (policy, count, pool.submit(replicas_needed, lab, policy, count))
            for count in NEEDED_ADAPTERS
            for policy in POLICIES
        ]
        policies = [
            (count, pool.submit(simulate, lab, Run(MEDIUM, policy, num_requests, count)))
            for count in ADAPTERS
            for policy in POLICIES
        ]
        memory = [
            (each, pool.submit(simulate, lab, Run(MEDIUM, "affinity", num_requests, ADAPTERS[-1],
                                                  each)))
            for each in MEMORIES
        ]  # fmt: skip
        roll_outs = [
            (each, pool.submit(simulate, lab, Run(each, "affinity", 5 * each, 10 * each,
                                                  has_roll_out=True)))
            for each in (10, 100, LARGE)
        ]  # fmt: skip
        return Found(
            policies=[Grown(count, run.result()[0]) for count, run in policies],
            memory=[Grown(each, run.result()[0]) for each, run in memory],
            needed=[Needed(policy, count, run.result()) for policy, count, run in needed],
            roll_outs=[Grown(each, run.result()[0]) for each, run in roll_outs],
            large=[Grown(LARGE_ADAPTERS, run.result()[0]) for times, run in large if times == 4],
            timed=[
                Timed(row.num_requests, row.num_events, row.num_steps, seconds)
                for row, seconds in (run.result() for _, run in large)
                if row.choice.policy == "affinity"
            ],
        )


@dataclass(frozen=True)
class Run:
    """One simulation. has_roll_out: the most popular adapter is replaced in the middle."""

    num_replicas: int
    policy: str
    num_requests: int
    num_adapters: int
    adapters_per_replica: int = ADAPTERS_PER_REPLICA
    rate: float = RATE
    has_roll_out: bool = False


def simulate(lab: Lab, run: Run) -> tuple[Row, float]:
    """What came of it, and the processor's seconds that it took."""
    gc.disable()
    rate = run.rate * lab.peak * run.num_replicas
    middle = run.num_requests / rate / 2
    begin = time.process_time()
    row = lab.row(
        run.num_replicas,
        run.policy,
        lab.requests(run.num_requests, run.num_adapters, rate),
        run.adapters_per_replica,
        [RollOut("adapter-0", middle)] if run.has_roll_out else (),
    )
    seconds = time.process_time() - begin
    print(f"{run}: {seconds:.1f} s", file=sys.stderr)
    return row, seconds


def replicas_needed(lab: Lab, policy: str, num_adapters: int) -> int:
    """Replicas that keep 99 of 100 requests within the limits, at ten times one's rate."""

    def is_enough(number: int) -> bool:
        rate = 10 / number
        run = Run(number, policy, NEEDED_REQUESTS, num_adapters, rate=rate)
        return simulate(lab, run)[0].goodput.share >= 0.99

    return smallest(is_enough, 160, 16)


# ── what is shown ───────────────────────────────────────────────────────────────────────────────


def draw(found: Found, folder: Path) -> None:
    def lines(value: str) -> Mapping[str, Mapping[float, float]]:
        return {
            policy: {
                one.varied: float(getattr(one.row, value))
                for one in found.policies
                if one.row.choice.policy == policy
            }
            for policy in POLICIES
        }

    plot_lines(
        {
            "median time to first token, ms": lines("ttft_p50"),
            "share of prompt tokens cached": lines("cached_share"),
            "adapters read": lines("adapter_loads"),
        },
        "adapters",
        folder / "scale-policies.svg",
    )


def markdown(lab: Lab, found: Found, cost_file: str) -> str:
    machine, costs = lab.costs.machine, lab.costs
    head = fill(
        f"Simulated with `{cost_file}`: {costs.model}, of {machine.cpu}, {machine.num_cores} "
        f"cores, load average {machine.load_average:g}. Within limits are requests with "
        f"{lab.limits}, {LIMITS_TIMES[0]:g} and {LIMITS_TIMES[1]:g} times what a lone request "
        f"takes. One replica answers {lab.peak:.1f} requests a second in a closed loop of 8. "
        "Times are in milliseconds of virtual time.",
        100,
        break_on_hyphens=False,
    )
    header = ("adapters", "policy", "within limits", "TTFT p50", "TTFT p99", "cached", "loads")
    parts = [
        head,
        f"### {MEDIUM} replicas, as adapters grow",
        "![policies as adapters grow](scale-policies.svg)",
        _table(header, _by_policy(found.policies)),
        f"### {LARGE:,} replicas",
        f"{found.large[0].row.num_requests:,} requests over {LARGE_ADAPTERS:,} adapters:",
        _table(header, _by_policy(found.large)),
        "### How many adapters a replica",
        f"{MEDIUM} replicas and {ADAPTERS[-1]:,} adapters:",
        _table(
            ("in memory", "within limits", "TTFT p50", "TTFT p99", "cached", "loads"),
            [(f"{one.varied:,}", *_cells(one.row)) for one in found.memory],
        ),
        "### How many replicas",
        _table(
            ("adapters", *POLICIES),
            [
                (f"{count:,}", *(str(one.num_replicas) for one in found.needed
                                 if one.num_adapters == count))
                for count in dict.fromkeys(one.num_adapters for one in found.needed)
            ],
        ),
        "### What a roll-out costs",
        _table(
            ("replicas", "seconds until everywhere", "loads", "TTFT p99"),
            [
                (f"{one.varied:,}", f"{one.row.rolled_out[0].seconds:.2f}",
                 f"{one.row.adapter_loads:,}", f"{one.row.ttft_p99:,.0f}")
                for one in found.roll_outs
            ],
        ),
        "### What a simulation takes",
        _table(
            ("requests", "events", "steps", "seconds of CPU", "milliseconds of it a request"),
            [
                (f"{one.num_requests:,}", f"{one.num_events:,}", f"{one.num_steps:,}",
                 f"{one.cpu_seconds:.0f}", f"{1e3 * one.cpu_seconds / one.num_requests:.2f}")
                for one in found.timed
            ],
        ),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _by_policy(rows: Sequence[Grown]) -> list[tuple[str, ...]]:
    return [(f"{one.varied:,}", one.row.choice.policy, *_cells(one.row)) for one in rows]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.goodput.share:.1%}",
        f"{row.ttft_p50:,.0f}",
        f"{row.ttft_p99:,.0f}",
        f"{row.cached_share:.0%}",
        f"{row.adapter_loads:,}",
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_page(page: Path, text: str) -> None:
    """Put the text between the page's markers."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cost", type=Path, required=True, help="the cost file, in the repository")
    parser.add_argument(
        "--num-requests", type=int, default=10_000, help="of most runs; the largest have four times"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--dry-run", action="store_true", help="print the page, and write nothing")
    args = parser.parse_args()
    lab = Lab(load_costs(args.cost))
    found = explore(lab, args.num_requests, args.workers)
    text = markdown(lab, found, args.cost.as_posix())
    print(text)
    if not args.dry_run:
        write_facts(ROOT / "benchmarks/results/scale.json", costs=lab.costs, found=found)
        draw(found, ROOT / "docs")
        write_page(ROOT / "docs/scale.md", text)


if __name__ == "__main__":
    main()
