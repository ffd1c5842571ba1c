"""`lora-serve fuzz --oracle`: the control plane alone, no model and no server."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from lora_serve.fuzz.oracle.campaign import OracleTotals, run_campaign, run_trace
from lora_serve.fuzz.progress import ProgressLine

EXIT_WRONG = 1
DEFAULT_NUM_REQUESTS = 100_000


def run_oracle(args: argparse.Namespace) -> int:
    """0 if every answer was the lone one, else 1 and the command that repeats what was not."""
    if args.num_operations is not None:
        return _repeat(args)
    started = time.monotonic()
    progress = ProgressLine(sys.stderr)
    limit = args.num_requests or (DEFAULT_NUM_REQUESTS if args.duration is None else None)

    def wants_more(totals: OracleTotals) -> bool:
        seconds = time.monotonic() - started
        done = f"{totals.num_requests:,}" + (f" of {limit:,}" if limit else "")
        progress.show(f"{done} requests, all as if alone, {totals.num_requests / seconds:,.0f}/s")
        is_late = args.duration is not None and seconds >= args.duration
        return not is_late and (limit is None or totals.num_requests < limit)

    totals = run_campaign(args.seed, wants_more)
    progress.close()
    print(_table(totals, time.monotonic() - started))
    _save(totals, args.json)
    for failure in totals.failures:
        print(
            f"seed {failure.seed}: {failure.what}\nrepeat it with: lora-serve fuzz --oracle "
            f"--seed {failure.seed} --num-operations {failure.num_operations}"
        )
    return EXIT_WRONG if totals.failures else 0


def _repeat(args: argparse.Namespace) -> int:
    """One trace, cut off after so many operations."""
    totals = run_trace(args.seed, args.num_operations)
    for failure in totals.failures:
        print(f"seed {failure.seed}, {failure.num_operations} operations: {failure.what}")
    if not totals.failures:
        print(f"seed {args.seed}: {totals.num_requests} requests, all as if alone")
    _save(totals, args.json)
    return EXIT_WRONG if totals.failures else 0


def _table(totals: OracleTotals, seconds: float) -> str:
    last_seed = totals.first_seed + totals.num_traces - 1
    rows = (
        ("traces", f"{totals.num_traces:,} (seeds {totals.first_seed} to {last_seed})"),
        ("requests", f"{totals.num_requests:,}"),
        ("tokens hit in the cache", f"{totals.num_hit_tokens:,}"),
        ("tokens loaded from tiers", f"{totals.num_tier_tokens:,}"),
        ("preemptions", f"{totals.num_preemptions:,}"),
        ("adapter evictions", f"{totals.num_evictions:,}"),
        ("engine restarts", f"{totals.num_restarts:,}"),
        ("KV events read", f"{totals.num_events:,}"),
        ("refused, as they had to be", f"{totals.num_refused:,}"),
        ("seconds", f"{seconds:,.0f}"),
        ("wrong traces", f"{len(totals.failures):,}"),
    )
    return "\n".join(f"{name:<28}{value}" for name, value in rows)


def _save(totals: OracleTotals, path: Path | None) -> None:
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(totals), indent=1) + b"\n")
