"""`lora-serve convert`: an adapter of another method of PEFT, as a plain LoRA adapter."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lora-serve convert ADAPTER OUT [options]"
    parser.description = (
        "Write what a PEFT adapter of any method that changes weights (DoRA, LoHa, LoKr, VeRA, "
        "(IA)³ …) adds to the model's projections as a LoRA adapter in the directory OUT. Exact "
        "where that is of low rank, else the nearest of that rank, with its error."
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="Directory of the adapter.")
    parser.add_argument("out", metavar="OUT", type=Path, help="Directory to make; must not exist.")
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="Directory or hub id of the model that it is for; the adapter's own "
        "base_model_name_or_path if left out.",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=64,
        metavar="N",
        help="Highest rank of a projection; lower where that is exact. (default: %(default)s)",
    )
    parser.add_argument(
        "--max-error",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="Write nothing if the delta of all projections is further off than this share of its "
        "norm. (default: %(default)s)",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="Leave out what an adapter cannot hold, such as biases and norms, and say so.",
    )
    parser.add_argument("--json", action="store_true", help="For machines: all projections.")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.convert_run import run_convert  # imports torch and peft

    return run_convert(args)
