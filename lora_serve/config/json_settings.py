"""Settings that may be given as one JSON object in vLLM's form, instead of a flag for each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from lora_serve.errors import ConfigError


def parse_json(text: str) -> Any:
    """What a text says. Raises ValueError unless it is JSON that is not nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(text: str | Mapping[str, object], flag: str) -> Mapping[str, object]:
    """The object that a flag's text is, or stands for. Raises ConfigError, naming the flag."""
    given: object = text
    if isinstance(text, str):
        try:
            given = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"{flag} {text[:80]!r} is not JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{flag} {text!r:.80} must be a JSON object")
    return given


def take_in_json(
    config: Any,
    text_field: str,
    prefix: str = "",
    read: Callable[[str | Mapping[str, object], str], Mapping[str, object]] = read_json,
) -> None:
    """Set what a config's JSON says, as if flags had said it, and forget the JSON.

    Args:
        text_field: the field that holds the JSON, as text or as the mapping that it stands for, or
            None; its flag has its name.
        prefix: what the fields' names begin with and the JSON's do not.
        read: turns the JSON, of the flag that it is given, into settings by name.

    Raises:
        ConfigError: for a setting that is unknown, of another type, or given as a flag, too.
    """
    text, flag = getattr(config, text_field), f"--{text_field.replace('_', '-')}"
    if text is None:
        return
    own = {
        each.name.removeprefix(prefix): each
        for each in fields(config)
        if each.name.startswith(prefix) and each.name != text_field
    }
    hints = get_type_hints(type(config))
    for name, value in read(text, flag).items():
        if name not in own:
            raise ConfigError(f"{flag}: unknown setting {name!s:.80}; known are {', '.join(own)}")
        default = own[name].default
        kind = _kind(hints[own[name].name])
        if type(value) is int and kind is float:
            value = _as_float(value)
        is_quantity = type(value) is str and "quantity" in own[name].metadata
        is_none = value is None and default is None
        if type(value) is not kind and not is_quantity and not is_none:
            example = "" if default is None else f", as {default!r}"
            raise ConfigError(f"{flag}: {name} {value!r:.80} must be a {kind.__name__}{example}")
        if getattr(config, own[name].name) not in (default, value):
            raise ConfigError(f"{flag}: {name} is given as a flag, too; give one of them")
        object.__setattr__(config, own[name].name, value)  # it is being made, and not yet shared
    object.__setattr__(config, text_field, None)


def _kind(hint: Any) -> type:
    """The type of a setting that may be None."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    kind: type = kinds[0] if kinds else hint
    return kind


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
