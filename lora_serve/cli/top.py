"""`lora-serve top`: what a server does at this moment, in a terminal."""

from __future__ import annotations

import argparse

from lora_serve.cli.server_arguments import ADMIN_KEYS, add_server_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what a server does: tokens and requests a second, latencies, the queue, the KV cache "
        "and its tiers, the busiest adapters, requests in flight. q or Ctrl-C ends it. Where the "
        "output is no terminal, it is plain text, again and again."
    )
    parser.add_argument(
        "--once", action="store_true", help="Show what happens in one interval, and end."
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="Time between two looks; a large server makes its metrics once a second at most. "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--metrics-url",
        metavar="URL",
        help="Where /metrics is, if the server has --metrics-port. No key is sent there. "
        "(default: that of --url)",
    )
    add_server_arguments(parser, ADMIN_KEYS)
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.top_run import run_top  # slow to import; not for --help

    return run_top(args)
