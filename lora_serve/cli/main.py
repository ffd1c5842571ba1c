"""`lora-serve`: finds the command, runs it, and says what is wrong in one line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from lora_serve import __version__
from lora_serve.cli.arguments import OneLineParser
from lora_serve.cli.bench import add_bench_parser
from lora_serve.cli.demo import add_demo_parser
from lora_serve.cli.fuzz import add_fuzz_parser
from lora_serve.cli.kv import add_kv_parser
from lora_serve.cli.merge import add_merge_parser
from lora_serve.cli.serve import add_serve_parser
from lora_serve.errors import LoraServeError

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Mistakes of the user are one line and exit code 2."""
    parser = OneLineParser(
        prog="lora-serve", description="Serve many LoRA adapters; every answer is exact."
    )
    parser.add_argument("--version", action="version", version=f"lora-serve {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_serve_parser(commands)
    add_demo_parser(commands)
    add_bench_parser(commands)
    add_fuzz_parser(commands)
    add_kv_parser(commands)
    add_merge_parser(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except LoraServeError as error:
        print(f"lora-serve: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would only show a traceback
        return 130


if __name__ == "__main__":
    sys.exit(main())
