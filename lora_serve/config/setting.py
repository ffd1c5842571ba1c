"""A setting: a field of a configuration, with the help of its flag, and how it is checked."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from lora_serve.errors import ConfigError


def setting(help: str, default: Any, **metadata: Any) -> Any:
    """A field with its flag's help; `choices`, `metavar`, `repeat` go to the parser."""
    return field(default=default, metadata={"help": help, **metadata})


def require_at_least(low: float, flag: str, value: float | None) -> None:
    if value is not None and not value >= low:  # nor is NaN
        raise ConfigError(f"{flag} {value} must be at least {low}")


def require_one_of(choices: tuple[str, ...], flag: str, value: str) -> None:
    if value not in choices:
        raise ConfigError(f"{flag} {value} must be one of {', '.join(choices)}")
