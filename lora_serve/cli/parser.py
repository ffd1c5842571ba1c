"""A parser of command lines that says in one line what is wrong and what was probably meant."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from lora_serve.cli.vllm_flags import NOT_OFFERED, with_effect

_MISSING = "the following arguments are required: "  # how argparse begins
NUMBERS: dict[object, str] = {int: "a whole number such as 8", float: "a number such as 0.5"}
Number = TypeVar("Number", int, float)


class OneLineParser(argparse.ArgumentParser):
    """Exits with 2 after one line on stderr. Flags are not abbreviated."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        if message.startswith(_MISSING):
            message = self._what_is_missing(message.removeprefix(_MISSING).split(", "))
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)

    def refuse_flags(self, *flags: str, why: str) -> None:
        """Say `why` to those who give these, which are another command's."""
        none = argparse.SUPPRESS
        self.add_argument(*flags, action=_Refused, nargs="?", const=why, default=none, help=none)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = sys.argv[1:] if args is None else args
        parsed, unknown = self.parse_known_args(list(map(_with_dashes, words)), namespace)
        if unknown:
            parser, flag = getattr(parsed, "parser", self), unknown[0].split("=")[0]
            if flag in NOT_OFFERED:
                self.error(f"{flag} is not offered: {NOT_OFFERED[flag]}; leave it out")
            meant = did_you_mean(flag, with_effect(parser._option_string_actions))
            what = "unknown argument" if flag.startswith("-") else "one argument too many:"
            self.error(f"{what} {unknown[0]}{meant} ({parser.prog} --help lists all)")
        return parsed

    def _what_is_missing(self, names: Sequence[str]) -> str:
        """Each argument that was not given, and what it is."""
        meanings = {_shown_name(action): self._meaning(action) for action in self._actions}
        missing = "; ".join(f"{name} is missing{meanings.get(name, '')}" for name in names)
        return f"{missing} ({self.prog} --help says more)"

    def _meaning(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return f": one of {', '.join(action.choices)}"
        described = self._get_formatter()._expand_help(action) if action.help else ""
        return f": {described.rstrip('.')}" if described else ""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """The argument as its type; what is no number is refused in words, not as "invalid int"."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in NUMBERS:
                raise
            wanted = NUMBERS[action.type]
            raise argparse.ArgumentError(action, f"want {wanted}, got {arg_string!r}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the action's choices; a command is one of them."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action,
                f"{value!r} is not one of {', '.join(map(str, action.choices))}"
                f"{did_you_mean(str(value), map(str, action.choices))}",
            )


class _Refused(argparse.Action):
    """A flag of another command; `const` says what to do instead."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, __: object, flag: str | None = None
    ) -> NoReturn:
        parser.error(f"{flag}: {self.const}")


def _shown_name(action: argparse.Action) -> str:
    """What argparse calls an argument in its messages."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def _with_dashes(word: str) -> str:
    """A flag that is written with underscores, as vLLM takes it, too."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def reader(read: Callable[[str], Number]) -> Callable[[str], Number]:
    """An argument's type: what `read` returns, or the reason why it does not, for the user."""

    def checked(text: str) -> Number:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for the end of a message; empty if nothing known is like `word`."""
    by_letters = {each.lstrip("-"): each for each in known}  # dashes make no two flags alike
    close = difflib.get_close_matches(word.lstrip("-"), list(by_letters), n=1)
    return f"; did you mean {by_letters[close[0]]}?" if close else ""
