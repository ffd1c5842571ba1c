"""An engine's config from settings that are named like the flags."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lora_serve.config import EngineConfig
from lora_serve.config.engine import engine_parts
from lora_serve.errors import ConfigError
from lora_serve.ops.cpu.numa import with_ranks_of_nodes


def engine_config(**settings: Any) -> EngineConfig:
    """Sort settings, named like the flags, into the parts of a config.

    Raises:
        ConfigError: naming a setting that does not exist.
    """
    parts: dict[str, Any] = {}
    for part, kind in engine_parts().items():
        names = {field.name for field in fields(kind)}
        parts[part] = kind(**{name: settings.pop(name) for name in list(settings) if name in names})
    if settings:
        raise ConfigError(f"unknown settings: {', '.join(sorted(settings))}")
    return with_ranks_of_nodes(EngineConfig(**parts))
