"""An engine's config from settings that are named like the flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

from lora_serve.config import EngineConfig
from lora_serve.config.engine import engine_parts
from lora_serve.config.setting import flag_name
from lora_serve.errors import ConfigError
from lora_serve.ops.cpu.numa import with_ranks_of_nodes


def engine_config(**settings: Any) -> EngineConfig:
    """Sort settings, named like the flags, into the parts of a config.

    Raises:
        ConfigError: naming a setting that does not exist, or one that is no number and must be.
    """
    parts: dict[str, Any] = {}
    for part, kind in engine_parts().items():
        names = {field.name for field in fields(kind)}
        given = {name: settings.pop(name) for name in list(settings) if name in names}
        _require_numbers(kind, given)
        parts[part] = kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})
    if settings:
        raise ConfigError(f"unknown settings: {', '.join(sorted(settings))}")
    return with_ranks_of_nodes(EngineConfig(**parts))


def _require_numbers(kind: type, given: Mapping[str, Any]) -> None:
    """Refuse what is no number where one is wanted, which the command line's parser refuses, too.

    Raises:
        ConfigError: naming the setting and what it is.
    """
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.name not in given:
            continue
        value, wanted = given[field.name], set(get_args(hints[field.name]) or (hints[field.name],))
        number = wanted - {type(None)}
        is_text_of_one = isinstance(value, str) and "quantity" in field.metadata
        if not number <= {int, float} or is_text_of_one or (value is None and type(None) in wanted):
            continue
        type_ = Real if float in number else Integral
        if isinstance(value, bool) or not isinstance(value, type_):
            what = "number" if float in number else "whole number"
            raise ConfigError(f"--{flag_name(field)} {value!r}: want a {what} such as 8")
