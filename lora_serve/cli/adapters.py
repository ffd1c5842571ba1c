"""`lora-serve adapters`: list, load, replace and check adapters, by their names."""

from __future__ import annotations

import argparse

from lora_serve.cli.parser import OneLineParser
from lora_serve.cli.server_arguments import ADMIN_KEYS, add_server_arguments

ACTIONS = {
    "ls": "list the adapters of a server",
    "load": "load adapters under names that are free",
    "replace": "load an adapter in the place of another; requests that run end on the old one",
    "rollback": "load again what stood under a name before its last change",
    "unload": "take adapters away; requests that run end on them",
    "replicas": "list the servers that share this one's catalog",
    "forget": "wait no longer for servers that are gone for good",
    "verify": "read an adapter's directory as a server would, without one; exit code 1 if refused",
}


def add_arguments(parser: OneLineParser) -> None:
    parser.description = "List, load, replace and check the adapters of a running server."
    parser.refuse_flags(
        *("--url", "--api-key", "--api-key-file"),
        why="stands behind the action, as in `lora-serve adapters ls --url URL`",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for action, what in ACTIONS.items():
        one = actions.add_parser(action, help=what, description=what[0].upper() + what[1:] + ".")
        if action == "verify":
            _add_verify_arguments(one)
        else:
            _add_remote_arguments(one, action)
        one.set_defaults(run=_run, parser=one, action=action)


def _add_remote_arguments(parser: argparse.ArgumentParser, action: str) -> None:
    if action in ("ls", "replicas"):
        parser.add_argument("--json", action="store_true", help="for machines: digests whole")
    elif action in ("load", "replace"):
        parser.usage = f"lora-serve adapters {action} (NAME PATH | NAME=PATH ...) [options]"
        parser.add_argument(
            "adapters",
            nargs="+",
            metavar="NAME=PATH",
            help="a name, and a directory as the server sees it or a hub id; one adapter may be "
            "written as two words",
        )
        parser.add_argument("--pinned", action="store_true", help="never evict it from memory")
    else:
        what = "a server's id" if action == "forget" else "of an adapter"
        parser.add_argument("names", nargs="+", metavar="NAME", help=what)
    add_server_arguments(parser, ADMIN_KEYS)


def _add_verify_arguments(parser: OneLineParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="directory of an adapter")
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="directory or hub id of the model that it is for; its config.json alone is read. The "
        "adapter's own base_model_name_or_path if left out, where that is a directory here. "
        "Without either, its shapes are compared with no model's.",
    )
    parser.add_argument(
        "--max-lora-rank", type=int, default=64, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for machines: all modules")
    parser.refuse_flags(
        *("--url", "--api-key", "--api-key-file"),
        why="verify reads directories of this machine and asks no server; leave it out, or list "
        "what a server has by `lora-serve adapters ls --url URL`",
    )


def _run(args: argparse.Namespace) -> int:
    if args.action == "verify":
        from lora_serve.cli.adapters_verify import run_verify  # imports torch

        return run_verify(args)
    from lora_serve.cli.adapters_actions import run_adapters  # slow to import; not for --help

    return run_adapters(args)
