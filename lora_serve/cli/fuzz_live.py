"""`lora-serve fuzz` on real kernels: servers, a cold engine beside them, a table at the end."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from itertools import count
from pathlib import Path

import msgspec

from lora_serve.bench.machine import describe_machine
from lora_serve.cli.fuzz_stages import Stages, opened_stages
from lora_serve.fuzz.counts import FuzzCounts, Kind
from lora_serve.fuzz.fuzzer import Verdict
from lora_serve.fuzz.progress import ProgressLine
from lora_serve.fuzz.trace import Trace, load_trace, save_trace

EXIT_WRONG = 1
DEFAULT_NUM_REQUESTS = 1000
MOST_SHOWN = 10


def run_live(args: argparse.Namespace) -> int:
    """0 if every answer was the lone one; else 1, a small trace, and how to repeat it."""
    with opened_stages(args) as stages:
        if args.replay is not None:
            return _replay(args, stages)
        return _fuzz(args, stages)


def _fuzz(args: argparse.Namespace, stages: Stages) -> int:
    started = time.monotonic()
    limit = args.num_requests or (DEFAULT_NUM_REQUESTS if args.duration is None else None)
    progress, found, failed = ProgressLine(sys.stderr), FuzzCounts(args.seed), None
    for seed in count(args.seed):
        trace = stages.trace(seed)
        verdict = stages.fuzzer_of(trace).check(trace)
        found.add(trace, verdict.run, verdict.findings)
        seconds = time.monotonic() - started
        done = f"{found.num_requests:,}" + (f" of {limit:,}" if limit else "")
        progress.show(
            f"{done} requests in {found.traces} traces, {found.num_wrong} wrong answers, "
            f"{found.num_requests / seconds:.1f}/s"
        )
        if not verdict.is_clean:
            failed = trace, verdict
            break
        is_late = args.duration is not None and seconds >= args.duration
        if is_late or (limit is not None and found.num_requests >= limit):
            break
    progress.close()
    print(_table(found, time.monotonic() - started))
    _save(args.json, found, failed[1] if failed else None)
    if failed is None:
        return 0
    _explain(args, stages, *failed)
    return EXIT_WRONG


def _replay(args: argparse.Namespace, stages: Stages) -> int:
    """Play one trace until it fails, at most --times."""
    trace = load_trace(args.replay)
    for number in range(args.times):
        verdict = stages.fuzzer_of(trace).check(trace)
        if not verdict.is_clean:
            print(f"failed the {_ordinal(number + 1)} time")
            _show(verdict)
            return EXIT_WRONG
    print(f"{args.replay}: {trace.num_requests} requests, {args.times} times, all as if alone")
    return 0


def _explain(args: argparse.Namespace, stages: Stages, trace: Trace, verdict: Verdict) -> None:
    print(f"\nthe trace of seed {trace.seed} fails:")
    _show(verdict)
    path = args.failure or Path(f"fuzz-{trace.seed}.json")
    save_trace(trace, path)
    progress = ProgressLine(sys.stderr)
    if args.shrink_seconds > 0:
        small = stages.fuzzer_of(trace).shrink(
            trace,
            args.shrink_seconds,
            lambda found: progress.show(f"still fails with {len(found.events)} events"),
        )
        progress.close()
        save_trace(small, path)
        print(f"made small: {len(small.events)} of {len(trace.events)} events")
    print(f"repeat it with: {_command(args, path)}")


def _show(verdict: Verdict) -> None:
    lines = verdict.lines()
    for line in lines[:MOST_SHOWN]:
        print(f"  {line}")
    if len(lines) > MOST_SHOWN:
        print(f"  … and {len(lines) - MOST_SHOWN} more")


def _command(args: argparse.Namespace, path: Path) -> str:
    words = ["lora-serve", "fuzz", "--replay", str(path)]
    for flag in ("model", "url", "redis_url"):
        if getattr(args, flag) is not None:
            words += [f"--{flag.replace('_', '-')}", getattr(args, flag)]
    if args.adapters:
        words += ["--adapters", *map(str, args.adapters)]
    if args.serve_args:
        words += ["--serve-args", *args.serve_args]
    return shlex.join(words)


# ── what came of it ─────────────────────────────────────────────────────────────────────────


def _table(found: FuzzCounts, seconds: float) -> str:
    columns = ("requests", "whole", "begun", "left", "aborted", "refused", "answers", "tokens",
               "wrong")  # fmt: skip
    lines = [f"{'':<18}" + "".join(f"{name:>10}" for name in columns)]
    total = Kind()
    for name, kind in sorted(found.kinds.items()):
        lines.append(_row(name, kind))
        for field in Kind.__struct_fields__:
            setattr(total, field, getattr(total, field) + getattr(kind, field))
    lines.append(_row("all", total))
    share = found.cached_tokens / max(1, found.prompt_tokens)
    facts = {
        "traces": f"{found.traces:,}",
        "cached": f"{found.cached_tokens:,} of {found.prompt_tokens:,} prompt tokens ({share:.0%})",
        **{name.replace("_", " "): f"{number:,}" for name, number in found.counts.items()},
        **{name: f"{number:,}" for name, number in sorted(found.events.items())},
        "seconds": f"{seconds:,.0f}",
        "wrong answers": f"{found.num_wrong:,}",
    }
    return "\n".join([*lines, "", *(f"{name:<20}{value}" for name, value in facts.items())])


def _row(name: str, kind: Kind) -> str:
    numbers = (kind.requests, kind.whole, kind.begun, kind.left, kind.aborted, kind.refused,
               kind.choices, kind.tokens, kind.wrong)  # fmt: skip
    return f"{name:<18}" + "".join(f"{number:>10,}" for number in numbers)


def _save(path: Path | None, found: FuzzCounts, failed: Verdict | None) -> None:
    if path is None:
        return
    document = {
        "machine": describe_machine(),
        "tally": found,
        "failures": failed.lines() if failed else [],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
