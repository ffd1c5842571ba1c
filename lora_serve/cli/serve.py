"""`lora-serve serve`: an engine process and the HTTP server before it."""

from __future__ import annotations

import argparse

from lora_serve.cli.arguments import add_config_arguments
from lora_serve.cli.vllm_flags import add_inert_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lora-serve serve [MODEL] [flags]"
    parser.description = "Serve a model and its adapters over an OpenAI-compatible HTTP API."
    parser.epilog = (
        "SIZE is a number of bytes, or 512MiB, 8GiB, 8GB and so on. A number of tokens may be "
        "16K (16384) or 16k (16000)."
    )
    add_config_arguments(parser)
    add_inert_arguments(parser)
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.serve_run import run_serve  # slow to import; not for --help

    return run_serve(args)
