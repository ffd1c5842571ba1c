"""What may stand in a command line, read from argparse's parsers. Knows no shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_serve.cli.vllm_flags import with_effect

# What users see in the place of a value that is a file or a directory.
PATH_METAVARS = frozenset(
    {"FILE", "DIR", "PATH", "MODEL", "ADAPTER", "OUT", "PATH|URL", "NAME=PATH", "TRACE"}
)


@dataclass(frozen=True, slots=True)
class Flag:
    """names: all of them. choices: its values, if they are known."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    is_path: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A command, or an action of one: what may follow it.

    path: such as "/kv/ls", "" before any command. commands: names with their help. choices: of
    its positional argument.
    """

    path: str
    flags: tuple[Flag, ...]
    commands: tuple[tuple[str, str], ...]
    choices: tuple[str, ...]
    takes_paths: bool


def completion_tree(parser: argparse.ArgumentParser) -> list[Place]:
    """The parser's own place first, then those of its commands and their actions."""
    return list(_places(parser, ""))


def _places(parser: argparse.ArgumentParser, path: str) -> Iterator[Place]:
    wanted = set(with_effect(parser._option_string_actions))
    flags, choices, takes_paths = [], [], False
    subparsers: list[argparse._SubParsersAction[argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subparsers.append(action)
        elif not action.option_strings:
            choices += [str(each) for each in action.choices or ()]
            takes_paths |= _is_path(action)
        elif wanted.intersection(action.option_strings):
            flags.append(_flag(action))
    commands = [
        (pseudo.dest, str(pseudo.help or ""))
        for each in subparsers
        for pseudo in each._choices_actions
    ]
    yield Place(path, tuple(flags), tuple(commands), tuple(choices), takes_paths)
    for each in subparsers:
        for name, child in each.choices.items():
            yield from _places(child, f"{path}/{name}")


def _flag(action: argparse.Action) -> Flag:
    takes_value = action.nargs != 0
    return Flag(
        tuple(action.option_strings),
        _sentence(action.help or ""),
        takes_value,
        tuple(str(each) for each in action.choices or ()),
        takes_value and _is_path(action),
    )


def _is_path(action: argparse.Action) -> bool:
    shown: Sequence[str | None] = (
        action.metavar if isinstance(action.metavar, tuple) else (action.metavar,)
    )
    return action.type is Path or any((each or "").split(" ")[0] in PATH_METAVARS for each in shown)


def _sentence(text: str) -> str:
    """The first sentence of a help, on one line."""
    first = " ".join(text.replace("%%", "%").split()).partition(". ")[0]
    return first.partition(" (default: ")[0].rstrip(".")
