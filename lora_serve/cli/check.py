"""`lora-serve check`: what must never happen with adapters and prefix caches, on any server."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_serve.cli.server_arguments import ADMIN_KEYS, USER_KEYS, add_key_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Probe an OpenAI-compatible server, by HTTP alone, for answers that come from the wrong "
        "adapter's weights or KV. Adapters are loaded under names of their own and unloaded "
        "again; the prefix cache may be emptied, so do not point it at production. "
        "Exit code 0: all passed; 1: one failed; 2: it could not be run."
    )
    parser.add_argument("url", metavar="URL", nargs="?", help="Base URL, with or without /v1.")
    _add_server(parser)
    _add_adapters(parser)
    _add_probes(parser)
    _add_results(parser)
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.check_run import run_check  # slow to import; not for --help

    return run_check(args)


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--model", default="", metavar="NAME",
                       help="Name the server gives its base model; asked from it if left out."
                       )  # fmt: skip
    add_key_arguments(parser, group, (*USER_KEYS, "OPENAI_API_KEY"))
    group.add_argument("--admin-api-key-file", type=Path, metavar="FILE",
                       help="File with another key, for loads, unloads and resets; else "
                       f"{ADMIN_KEYS[0]} of the environment.")  # fmt: skip
    group.add_argument("--cacert", type=Path, metavar="FILE",
                       help="Certificates to trust, as PEM.")  # fmt: skip
    group.add_argument("--insecure", action="store_true",
                       help="Accept any certificate.")  # fmt: skip
    group.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS",
                       help="Longest that one answer may take; a probe may take ten times that. "
                       "(default: %(default)g)")  # fmt: skip


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapters")
    group.add_argument("--model-path", default="", metavar="DIR",
                       help="Directory with the base model's config.json: adapters are made up for "
                       "its shapes. Left out, what the server tells as its root is tried."
                       )  # fmt: skip
    group.add_argument("--adapter", type=Path, action="append", default=[], metavar="DIR",
                       help="One of two adapters to use instead, which must answer differently; "
                       "give it twice.")  # fmt: skip
    group.add_argument("--served-adapter", action="append", default=[], metavar="NAME[=JSON]",
                       help="One of two adapters that a server without load routes serves already, "
                       "with fields that ask for it if its name is not its model; give it twice."
                       )  # fmt: skip
    group.add_argument("--workspace", type=Path, metavar="DIR",
                       help="Where adapters are written for the server to read; a temporary "
                       "directory if left out.")  # fmt: skip
    group.add_argument("--workspace-on-server", default="", metavar="DIR",
                       help="How the server sees that directory, if not by the same path."
                       )  # fmt: skip


def _add_probes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("probes")
    group.add_argument("--probe", action="append", default=[], metavar="NAME",
                       help="Run this one only; may be given more than once.")  # fmt: skip
    group.add_argument("--list", action="store_true", help="List them, and end.")
    group.add_argument("--tolerance", type=float, default=0.0, metavar="X",
                       help="How far logprobs may lie apart, for servers that do not promise equal "
                       "bits; answers may then part where two tokens are that close. "
                       "(default: 0, equal to the bit)")  # fmt: skip
    group.add_argument("--prompt-tokens", type=int, default=400, metavar="N",
                       help="About how long prompts are: more than a block of the cache. "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--pressure-requests", type=int, default=24, metavar="N",
                       help="Prompts of three times that length that `pressure` sends at once. "
                       "(default: %(default)s)")  # fmt: skip


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--json", type=Path, metavar="FILE",
                       help="Write all, with every request of what failed.")  # fmt: skip
    group.add_argument("--junit", type=Path, metavar="FILE", help="Write JUnit's XML.")
