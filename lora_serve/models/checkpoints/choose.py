"""Which format a checkpoint has."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from lora_serve.config.model import CHECKPOINT_FORMATS
from lora_serve.models.checkpoints.base import CheckpointFormat


def format_named(name: str) -> CheckpointFormat:
    """One of CHECKPOINT_FORMATS; its module is imported when it is asked for."""
    module = import_module(f"lora_serve.models.checkpoints.{name}")
    found: CheckpointFormat = module.FORMAT
    return found


def formats_for(load_format: str) -> tuple[CheckpointFormat, ...]:
    """The formats that --load-format allows, the most common first."""
    names = (load_format,) if load_format in CHECKPOINT_FORMATS else CHECKPOINT_FORMATS
    return tuple(map(format_named, names))


def format_of(directory: Path, load_format: str) -> CheckpointFormat:
    """The format of it: the first, whose errors say what is missing, if none fits."""
    formats = formats_for(load_format)
    if directory.is_file():  # also one that is broken, and says so when it is read
        return format_named("gguf")
    return next((each for each in formats if each.recognises(directory)), formats[0])
