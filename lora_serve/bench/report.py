"""Reports a run to people (a table) and to programs (JSON, with the machine it ran on)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from lora_serve.bench.goodput import Goodput, Limits
from lora_serve.bench.load import LoadResult
from lora_serve.bench.machine import Machine
from lora_serve.bench.summary import RunSummary, Spread, Summary, summarize
from lora_serve.bench.workload import WorkloadSpec
from lora_serve.observability.table import text_table

FORMAT = "lora-serve/bench/1"
MAX_ADAPTER_ROWS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured workload. workload: what it was drawn from, or the file it was read from.

    limits: within which a request counts for the goodput; None to tell no goodput.
    """

    title: str
    url: str
    model: str
    workload: WorkloadSpec | str
    max_concurrency: int | None
    machine: Machine
    result: LoadResult
    limits: Limits | None = None

    @property
    def goodput(self) -> Goodput | None:
        if self.limits is None:
            return None
        return Goodput.of(self.result.records, self.limits, self.result.wall_seconds)


def save_json(run: Run, path: Path) -> None:
    """Write the run with every request's record, so that any other figure can be drawn from it."""
    document = {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "title": run.title,
        "server": {"url": run.url, "model": run.model},
        "workload": run.workload,
        "max_concurrency": run.max_concurrency,
        "machine": run.machine,
        "summary": summarize(run.result),
        "limits": run.limits,
        "goodput": run.goodput,
        "requests": run.result.records,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def text_report(run: Run) -> str:
    """The run on one screen."""
    summary = summarize(run.result)
    parts = [_head(run), latency_table(summary.total, _has_times(run)), _rates(summary, run)]
    if len(summary.by_adapter) > 1:
        parts.append(_adapter_table(summary))
    parts += [f"error, {count} times: {error}" for error, count in summary.errors.items()]
    return "\n\n".join(parts)


def latency_table(summary: Summary, with_lateness: bool) -> str:
    """with_lateness: also how late requests left; in a closed loop that is only their turn."""
    spreads = [
        ("time to first token", summary.ttft),
        ("inter-token latency", summary.itl),
        ("time per output token", summary.tpot),
        ("end to end", summary.e2e),
    ]
    if with_lateness:
        spreads.append(("sent late by", summary.late))
    rows = [(name, *_milliseconds(spread)) for name, spread in spreads if spread]
    return text_table(("ms", "mean", "p50", "p90", "p99"), rows)


def _has_times(run: Run) -> bool:
    return isinstance(run.workload, str) or run.workload.request_rate is not None


def _head(run: Run) -> str:
    pace = f"at most {run.max_concurrency} at a time" if run.max_concurrency else "unlimited"
    if isinstance(run.workload, WorkloadSpec) and run.workload.request_rate:
        pace = f"Poisson, {run.workload.request_rate:g} requests/s, {pace}"
    machine = run.machine
    return (
        f"{run.title}: {len(run.result.records)} requests, {pace}\n"
        f"{run.model} at {run.url}\n"
        f"{machine.cpu}, {machine.num_cores} cores, {machine.memory_gib:g} GiB, "
        f"load average {machine.load_average:g} before the run"
    )


def _rates(summary: RunSummary, run: Run) -> str:
    total = summary.total
    cached = f" ({total.cached_share:.0%} cached)" if total.cached_tokens else ""
    lines = [
        f"requests       {total.num_requests} ({total.num_failed} failed) in "
        f"{total.wall_seconds:.2f} s: {total.requests_per_second:.2f}/s",
        f"prompt tokens  {total.prompt_tokens:,}{cached}",
        f"output tokens  {total.output_tokens:,}: {total.output_tokens_per_second:.1f}/s "
        f"(prompts too: {total.total_tokens_per_second:.1f}/s)",
        f"client         {summary.client_cpu_share:.1%} of a core",
    ]
    if goodput := run.goodput:
        lines.append(
            f"goodput        {goodput.requests_per_second:.2f}/s: {goodput.share:.1%} of the "
            f"requests were within {run.limits}"
        )
    if total.tokens_per_event > 1.05:
        lines.append(
            f"note           the server bundles {total.tokens_per_event:.2f} tokens an event; "
            "inter-token latency is between bundles"
        )
    return "\n".join(lines)


def _adapter_table(summary: RunSummary) -> str:
    header = ("adapter", "requests", "failed", "out tok/s", "TTFT p50", "TTFT p99", "ITL p50",
              "ITL p99", "E2E p50")  # fmt: skip
    groups = sorted(summary.by_adapter.items(), key=lambda item: -item[1].num_requests)
    rows = [_adapter_row(name, group) for name, group in groups[:MAX_ADAPTER_ROWS]]
    table = text_table(header, rows)
    left_out = len(groups) - MAX_ADAPTER_ROWS
    return table + f"\n… and {left_out} more adapters; --json has all" * (left_out > 0)


def _adapter_row(name: str, group: Summary) -> tuple[str, ...]:
    return (
        name,
        str(group.num_requests),
        str(group.num_failed),
        f"{group.output_tokens_per_second:.1f}",
        *_milliseconds(group.ttft)[1::2],
        *_milliseconds(group.itl)[1::2],
        _milliseconds(group.e2e)[1],
    )


def _milliseconds(spread: Spread | None) -> tuple[str, str, str, str]:
    if spread is None:
        return ("–", "–", "–", "–")
    return (f"{spread.mean:,.1f}", f"{spread.p50:,.1f}", f"{spread.p90:,.1f}", f"{spread.p99:,.1f}")
