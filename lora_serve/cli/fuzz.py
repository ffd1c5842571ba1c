"""`lora-serve fuzz`: random traces, every answer compared with a cold engine's."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_serve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Play random traces on servers of its own, or on one at a URL, and compare "
        "every answer, bit for bit, with that of a cold engine that is alone with the request. "
        "Exit code 1 if one differs; then the trace is made small and kept."
    )
    _add_traces(parser)
    _add_server(parser)
    _add_oracle(parser)
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    _check_limits(args)
    if args.oracle:
        from lora_serve.cli.fuzz_oracle import run_oracle  # slow to import; not for --help

        return run_oracle(args)
    from lora_serve.cli.fuzz_live import run_live

    return run_live(args)


def _check_limits(args: argparse.Namespace) -> None:
    """Refuse numbers of which no trace, or one without an end, would come."""
    if args.num_operations is not None and not args.oracle:
        raise ConfigError("--num-operations needs --oracle")
    for flag in ("num_requests", "requests_per_trace", "concurrency", "times", "num_operations"):
        count = getattr(args, flag)
        if count is not None and count < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} {count} must be at least 1")
    if args.duration is not None and not args.duration > 0:  # as NaN is not
        raise ConfigError(f"--duration {args.duration:g} must be above 0")
    if not args.shrink_seconds >= 0:
        raise ConfigError(f"--shrink-seconds {args.shrink_seconds:g} must be at least 0")


def _add_traces(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traces")
    group.add_argument("--seed", type=int, default=0, metavar="N",
                       help="Seed of the first trace; those after it have the next ones. "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--num-requests", type=int, metavar="N",
                       help="Stop after so many requests. (default: 1000; with --oracle 100000)"
                       )  # fmt: skip
    group.add_argument("--duration", type=float, metavar="SECONDS", help="Stop after so long.")
    group.add_argument("--requests-per-trace", type=int, default=100, metavar="N",
                       help="(default: %(default)s)")  # fmt: skip
    group.add_argument("--concurrency", type=int, default=16, metavar="N",
                       help="Most requests at once. (default: %(default)s)")  # fmt: skip
    group.add_argument("--faults", default="kill,tier", metavar="LIST",
                       help="What may go wrong on purpose: kill (the engine process), tier (files "
                       "of the disk tier), or none; not at a URL. (default: %(default)s)"
                       )  # fmt: skip
    group.add_argument("--replay", type=Path, metavar="FILE", help="Play this trace instead.")
    group.add_argument("--times", type=int, default=3, metavar="N",
                       help="With --replay: how often, unless it fails. (default: %(default)s)"
                       )  # fmt: skip
    group.add_argument("--failure", type=Path, metavar="FILE",
                       help="Where a failing trace is kept. (default: fuzz-SEED.json)"
                       )  # fmt: skip
    group.add_argument("--shrink-seconds", type=float, default=600.0, metavar="SECONDS",
                       help="Longest time to make it small; 0 for never. (default: %(default)g)"
                       )  # fmt: skip
    group.add_argument("--json", type=Path, metavar="FILE", help="Write the figures.")


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--model", help="Model to serve; if left out, the demo's, made on first "
                       "use, and small ones of other kinds.")  # fmt: skip
    group.add_argument("--adapters", nargs="+", type=Path, default=[], metavar="DIR",
                       help="With --model: adapters for it, of which versions are made."
                       )  # fmt: skip
    group.add_argument("--url", help="Base URL of a running server, which must see this machine's "
                       "files; --model, --adapters and --serve-args must be its own."
                       )  # fmt: skip
    group.add_argument("--api-key", help="Key to send as a bearer token.")
    group.add_argument("--redis-url", metavar="URL", help="Use this Redis as a tier, too.")
    group.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], metavar="ARG",
                       help="The rest of the line goes to `lora-serve serve`.")  # fmt: skip


def _add_oracle(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the control plane alone")
    group.add_argument("--oracle", action="store_true",
                       help="No model: an executor whose KV is a hash of all that shaped it shows "
                       "every stale or foreign block.")  # fmt: skip
    group.add_argument("--num-operations", type=int, metavar="N",
                       help="With --oracle: only the trace of --seed, and only its first N "
                       "operations.")  # fmt: skip
