"""Which server a command talks to, and with which key: flags, a file or the environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_serve.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
USER_KEYS = ("LORA_SERVE_API_KEY", "VLLM_API_KEY")
ADMIN_KEYS = ("LORA_SERVE_ADMIN_API_KEY", *USER_KEYS)  # the first that is set


def add_server_arguments(
    parser: argparse.ArgumentParser, variables: Sequence[str], default: str = DEFAULT_URL
) -> None:
    """Add --url, --api-key and --api-key-file; `chosen_key` reads the last two.

    variables: of the environment, in which a key is looked for without these flags.
    """
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        metavar="URL",
        help=f"Its address, with /v1 or without, or unix:/PATH of its socket. (default: {default})",
    )
    add_key_arguments(parser, group, variables)


def add_key_arguments(
    parser: argparse.ArgumentParser, group: Any, variables: Sequence[str]
) -> None:
    """Add --api-key and --api-key-file to a group of the parser; `chosen_key` reads them."""
    keys = group.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"Key to send; else {_listed(variables)} of the environment. Other users of this "
        "machine can read flags, so a file or the environment is better.",
    )
    keys.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="File whose first line that is no comment is the key.",
    )
    parser.set_defaults(key_variables=variables)


def chosen_key(args: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """The key to send, if there is one.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    if args.api_key is not None:
        return str(args.api_key)
    if args.api_key_file is None:
        given = [environ[name] for name in args.key_variables if environ.get(name)]
        return given[0] if given else None
    return key_in_file(args.api_key_file, "--api-key-file")


def key_in_file(path: Path, flag: str) -> str:
    """The file's first line that is no comment.

    Raises:
        ConfigError: naming the flag, if the file cannot be read or holds no key.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path} holds no key; write one into it")
    return keys[0]


def _listed(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
