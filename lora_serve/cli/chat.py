"""`lora-serve chat`: talk to a model and its adapters in a terminal."""

from __future__ import annotations

import argparse

from lora_serve.cli.server_arguments import USER_KEYS, add_server_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "lora-serve chat [--url URL] [--model NAME] [--system TEXT]\n"
        "       lora-serve chat [--model NAME] [--system TEXT] MODEL [flags of serve]"
    )
    parser.description = (
        "Talk to a server in a terminal. With MODEL, or where no server answers, one is started "
        "for the chat and ended with it: everything from MODEL on is passed to `lora-serve serve`. "
        "/help in the chat lists its commands. If the input is a pipe, each line is a question, "
        "and the output is the answers alone."
    )
    parser.add_argument(
        "--model", metavar="NAME", help="Model or adapter to ask first. (default: the model)"
    )
    parser.add_argument("--system", metavar="TEXT", help="System message to begin with.")
    add_server_arguments(parser, USER_KEYS)
    rest = parser.add_argument(
        "serve_args",
        nargs=argparse.PARSER,
        metavar="MODEL [flags of serve]",
        help="Start a server for this directory or hub id.",
    )
    rest.required = False  # argparse has no other way to say "the rest, from a first word on"
    parser.set_defaults(run=_run, parser=parser, serve_args=[])


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.chat_run import run_chat  # slow to import; not for --help

    return run_chat(args)
