"""Chooses how a model's answers are read: by name, or by what its chat template holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from lora_serve.chat.reasoning_parsers.parser import ReasoningFormat
from lora_serve.chat.reasoning_parsers.registry import REASONING_FORMATS
from lora_serve.chat.tool_parsers.parser import ToolFormat
from lora_serve.chat.tool_parsers.registry import TOOL_ALIASES, TOOL_FORMATS
from lora_serve.errors import ConfigError

AUTO, NONE = "auto", "none"


class _Format(Protocol):
    @property
    def name(self) -> str: ...

    def is_in(self, template: str) -> bool: ...


F = TypeVar("F", bound=_Format)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format of tool calls called `name`; for "auto" the template's, if it has one.

    Raises:
        ConfigError: there is no such format.
    """
    known = TOOL_ALIASES.get(name, name)
    return _format("--tool-call-parser", known, template, TOOL_FORMATS, TOOL_ALIASES)


def require_tool_format(form: ToolFormat | None) -> None:
    """Raise ConfigError where --enable-auto-tool-choice has no format to read calls in."""
    if form is None:
        raise ConfigError(
            "--enable-auto-tool-choice: the chat template holds no known format of tool "
            "calls; name one with --tool-call-parser"
        )


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The format of reasoning, in the same way."""
    return _format("--reasoning-parser", name, template, REASONING_FORMATS)


def _format(
    flag: str, name: str, template: str, formats: Sequence[F], aliases: Iterable[str] = ()
) -> F | None:
    if name == NONE:
        return None
    for form in formats:
        if form.name == name or (name == AUTO and form.is_in(template)):
            return form
    if name == AUTO:
        return None
    names = ", ".join((AUTO, NONE, *sorted([*(form.name for form in formats), *aliases])))
    raise ConfigError(f"{flag} {name} must be one of {names}")
