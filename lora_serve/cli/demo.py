"""`lora-serve demo`: shows that a replaced adapter is replaced, on a tiny model or a given one."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a tiny model with two adapters (once), start servers and play every "
        "scenario in which a replaced adapter's cached KV could answer. Exit code 1 if any did. "
        "With --model, on that model: its first answer is shown, and adapters of random numbers "
        "take the place of trained ones."
    )
    parser.add_argument(
        "--model",
        default="",
        help="Directory, hub id or GGUF file of a model to play on, or smollm2; the demo's own "
        "if left out.",
    )
    parser.add_argument(
        "--keep", action="store_true", help="Leave the server up and say what to try."
    )
    parser.add_argument(
        "--port", type=int, default=0, help="Port of the server; a free one if left out."
    )
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.demo_run import run_demo  # slow to import; not for --help

    return run_demo(args)
