"""A simulation's rows as a table for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from lora_serve.bench.goodput import Goodput, Limits
from lora_serve.bench.summary import percentile
from lora_serve.bench.workload import WorkloadSpec
from lora_serve.observability.table import text_table
from lora_serve.simulate.costs import Costs, EngineSettings
from lora_serve.simulate.records import Simulated
from lora_serve.simulate.rollout import RolledOut

FORMAT = "lora-serve/simulate/1"


class Choice(msgspec.Struct, frozen=True):
    """What a row was simulated with."""

    num_replicas: int
    policy: str
    adapters_per_replica: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation. Times in milliseconds; busy_share: of replicas' time, spent in steps."""

    choice: Choice
    num_requests: int
    num_failed: int
    wall_seconds: float
    goodput: Goodput
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    output_tokens_per_second: float
    cached_share: float
    adapter_loads: int
    num_preemptions: int
    busy_share: float
    num_steps: int
    num_events: int
    errors: dict[str, int]
    rolled_out: tuple[RolledOut, ...]

    @classmethod
    def of(cls, choice: Choice, simulated: Simulated, limits: Limits) -> Row:
        records, totals = simulated.records, simulated.totals
        done = [record for record in records if record.error is None]
        errors: dict[str, int] = {}
        for record in records:
            if record.error is not None:
                errors[record.error] = errors.get(record.error, 0) + 1
        wall = max(simulated.wall_seconds, 1e-9)
        ttfts = sorted(1e3 * record.ttft_seconds for record in done) or [0.0]
        tpots = [1e3 * r.tpot_seconds for r in done if r.tpot_seconds is not None]
        return cls(
            choice=choice,
            num_requests=len(records),
            num_failed=len(records) - len(done),
            wall_seconds=wall,
            goodput=Goodput.of(records, limits, wall),
            ttft_p50=percentile(ttfts, 0.5),
            ttft_p99=percentile(ttfts, 0.99),
            tpot_p50=percentile(sorted(tpots) or [0.0], 0.5),
            output_tokens_per_second=sum(record.output_tokens for record in done) / wall,
            cached_share=sum(record.cached_tokens for record in done)
            / max(1, sum(record.prompt_tokens for record in done)),
            adapter_loads=totals.adapter_loads,
            num_preemptions=totals.num_preemptions,
            busy_share=fmean(totals.busy_seconds) / wall,
            num_steps=totals.num_steps,
            num_events=totals.num_events,
            errors=errors,
            rolled_out=simulated.rolled_out,
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Rows, and all that they follow from. needed: replicas found for each (policy, adapters)."""

    format: str = FORMAT
    costs: Costs
    engine: EngineSettings
    workload: WorkloadSpec | str
    max_concurrency: int | None
    limits: Limits
    attainment: float | None
    rows: tuple[Row, ...]


def report_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def report_text(report: Report) -> str:
    """The rows on one screen, below what they follow from."""
    machine = report.costs.machine
    head = (
        f"simulated with the costs of {report.costs.model} on {machine.cpu}, {machine.num_cores} "
        f"cores (commit {machine.commit})\n"
        f"goodput: requests within {report.limits}"
    )
    header = ("replicas", "policy", "adapters", "goodput/s", "within", "out tok/s", "TTFT p50",
              "TTFT p99", "TPOT p50", "cached", "loads", "busy")  # fmt: skip
    rows = [_cells(row) for row in report.rows]
    parts = [head, text_table(header, rows, words=(1,)), "times in ms"]
    for row in report.rows:
        parts += [_roll_out_line(row, one) for one in row.rolled_out]
        parts += [_error_line(row, text) for text in row.errors]
    return "\n\n".join(parts[:2]) + "\n" + "\n".join(parts[2:])


def _roll_out_line(row: Row, one: RolledOut) -> str:
    return (
        f"{one.name}, replaced at {one.at_seconds:g} s, is on all {row.choice.num_replicas} "
        f"replicas {one.seconds:.2f} s later ({row.choice.policy})"
    )


def _error_line(row: Row, text: str) -> str:
    where = f"{row.choice.num_replicas} replicas, {row.choice.policy}"
    return f"error, {row.errors[text]} times ({where}): {text}"


def _cells(row: Row) -> Sequence[str]:
    return (
        str(row.choice.num_replicas),
        row.choice.policy,
        str(row.choice.adapters_per_replica),
        f"{row.goodput.requests_per_second:,.2f}",
        f"{row.goodput.share:.1%}",
        f"{row.output_tokens_per_second:,.0f}",
        f"{row.ttft_p50:,.1f}",
        f"{row.ttft_p99:,.1f}",
        f"{row.tpot_p50:,.1f}",
        f"{row.cached_share:.0%}",
        f"{row.adapter_loads:,}",
        f"{row.busy_share:.0%}",
    )
