"""`lora-serve completion`: a script by which a shell completes commands, flags and values."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")
EPILOG = """\
For this shell alone:   source <(lora-serve completion bash)   (or zsh)
                        lora-serve completion fish | source
For all that come:      lora-serve completion bash > \\
                            ~/.local/share/bash-completion/completions/lora-serve
                        lora-serve completion zsh > DIR/_lora-serve   (a DIR of $fpath)
                        lora-serve completion fish > ~/.config/fish/completions/lora-serve.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a script by which a shell completes lora-serve's commands and flags."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=" or ".join(SHELLS))
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.completion_scripts import SCRIPTS
    from lora_serve.cli.completion_tree import completion_tree
    from lora_serve.cli.main import parser_of_all

    print(SCRIPTS[args.shell](completion_tree(parser_of_all())), end="")
    return 0
