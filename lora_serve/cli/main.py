"""`lora-serve`: finds the command, runs it, and says what is wrong in one line.

A command's module is imported only when that command was asked for; help, the version and a typo
import none of them. A new command is a module with `add_arguments` and a line in COMMANDS.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from lora_serve import __version__
from lora_serve.cli.parser import OneLineParser
from lora_serve.errors import LoraServeError
from lora_serve.observability.escapes import escaped

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

COMMANDS: Mapping[str, str] = {  # each with a module of its name beside this one, and its help
    "serve": "serve a model and its adapters over HTTP",
    "demo": "play the reload scenarios against real servers, of a tiny model or of yours",
    "adapters": "list, load, replace, roll back and check adapters",
    "bench": "measure an OpenAI-compatible server",
    "simulate": "say how many replicas a workload needs, and with which policy",
    "chat": "talk to a model and its adapters in a terminal",
    "check": "probe any OpenAI-compatible server for answers of the wrong adapter or KV",
    "doctor": "say what this machine is, what is missing and what to set",
    "top": "show what a server does at this moment",
    "fuzz": "compare answers to random requests with those of a cold server",
    "kv": "list, verify and clear stored KV",
    "completion": "print a script by which a shell completes commands and flags",
    "convert": "write an adapter of another method of PEFT as a plain LoRA adapter",
    "merge": "add an adapter's delta to a model's weights and save the sum",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A user's mistake is one line on stderr, and ends with 2."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        parser = _parser_for(words)
        args = parser.parse_args(words)
        if "run" in args:
            return int(args.run(args))
        parser.print_help()
        return 0
    except LoraServeError as error:
        for line in str(error).splitlines():
            print(f"lora-serve: error: {escaped(line)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would only show a traceback
        return EXIT_INTERRUPTED


def parser_of_all() -> OneLineParser:
    """The parser of all commands, each of which knows its arguments; it takes its time."""
    parser, parsers = _bare_parsers()
    for name, each in parsers.items():
        _add_arguments(name, each)
    return parser


def _parser_for(words: Sequence[str]) -> OneLineParser:
    """The parser of all commands, of which only the one in `words` knows its arguments."""
    parser, parsers = _bare_parsers()
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and "/" in chosen:
        parser.error(f"{chosen} is no command; to serve a model: lora-serve serve {chosen}")
    if chosen in parsers:
        _add_arguments(chosen, parsers[chosen])
    return parser


def _bare_parsers() -> tuple[OneLineParser, dict[str, OneLineParser]]:
    """The parser of all commands, and theirs, which know no arguments yet."""
    parser = OneLineParser(
        prog="lora-serve", description="Serve many LoRA adapters; every answer is exact."
    )
    parser.add_argument("--version", action="version", version=f"lora-serve {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    return parser, {name: commands.add_parser(name, help=what) for name, what in COMMANDS.items()}


def _add_arguments(name: str, parser: OneLineParser) -> None:
    import_module(f"lora_serve.cli.{name}").add_arguments(parser)


if __name__ == "__main__":
    sys.exit(main())
