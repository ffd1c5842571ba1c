"""`lora-serve doctor`: what this machine is, what is missing, and what to set."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what this machine is, which kernels serve on it, what is missing and what to set. "
        "With MODEL, also whether it fits; its weights are not read. Exit code 1 if a server could "
        "not start."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory, hub id or GGUF file of a model to be served, or smollm2",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="say whether N ranks have their places here, and what each holds of MODEL",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.doctor_run import run_doctor  # not for --help

    return run_doctor(args)
