"""`lora-serve kv`: what the KV tiers keep on a disk or in Redis, also while servers use it."""

from __future__ import annotations

import argparse

from lora_serve.cli.parser import OneLineParser, reader
from lora_serve.config.quantities import seconds_of

ACTIONS = {
    "ls": "what is stored: by adapter, version and salt",
    "verify": "read everything, and check every block; exit code 1 if one is bad",
    "clear": "delete everything, or what the options choose; asks first",
    "stats": "totals, by adapter and over all",
}


def add_arguments(parser: OneLineParser) -> None:
    parser.description = "Look into the KV that servers keep on a disk or in Redis."
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for action, what in ACTIONS.items():
        one = actions.add_parser(action, help=what, description=what[0].upper() + what[1:] + ".")
        one.add_argument("where", metavar="PATH|URL", help="a --kv-disk-path, or a --kv-redis-url")
        one.add_argument(
            "--redis-password-file",
            metavar="FILE",
            help="Redis's password; else LORA_SERVE_KV_REDIS_PASSWORD in the environment",
        )
        if action == "verify":
            one.add_argument(
                "--mac-key-file", metavar="FILE", help="the servers' --kv-mac-key-file"
            )
        if action == "clear":
            _add_choices(one)
        else:
            one.add_argument(
                "--json", action="store_true", help="for machines: JSON, digests whole"
            )
        one.refuse_flags(
            *("--kv-disk-path", "--kv-redis-url", "--url"),
            why=f"give the path, or the redis:// URL, without a flag: lora-serve kv {action} "
            "PATH|URL",
        )
        one.set_defaults(run=_run, parser=one, action=action)


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.kv_actions import run_kv  # slow to import; not for --help

    return run_kv(args)


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", metavar="NAME", help="only this adapter's KV; \"\": the base model's"
    )
    parser.add_argument(
        "--version",
        metavar="HEX",
        type=digest_start,
        help="only of adapter versions whose digest begins so",
    )
    parser.add_argument(
        "--salt", metavar="HEX", type=digest_start, help="only of salts whose digest begins so"
    )
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        type=reader(seconds_of),
        help="only where the newest block was written so long ago: 30m, 2h, 7d, or seconds",
    )
    parser.add_argument("--yes", action="store_true", help="delete without a question")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be deleted, and delete nothing"
    )


def digest_start(text: str) -> str:
    """Nothing would choose everything, as an unset variable of a script does."""
    start = text.lower()
    if not start or set(start) - set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin a digest; see `kv ls --json`")
    return start
