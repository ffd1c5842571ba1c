"""Command-line flags, made from the config classes: one flag a field, help from its metadata."""

from __future__ import annotations

import argparse
from dataclasses import Field, fields
from typing import Any, TypeVar, get_args, get_type_hints

from lora_serve.cli.parser import reader
from lora_serve.config import (
    CacheConfig,
    CatalogConfig,
    EngineConfig,
    FleetConfig,
    KVEventsConfig,
    KVTierConfig,
    LimitsConfig,
    LogConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from lora_serve.config.engine import engine_parts
from lora_serve.config.quantities import READERS, shown_size
from lora_serve.config.refusals import Refusals
from lora_serve.config.setting import flag_name
from lora_serve.errors import ConfigError
from lora_serve.ops.cpu.numa import with_ranks_of_nodes

Config = TypeVar("Config", bound=Any)

GROUPS: tuple[tuple[str, type], ...] = (
    ("model", ModelConfig),
    ("KV cache", CacheConfig),
    ("ranks", ParallelConfig),
    ("scheduler", SchedulerConfig),
    ("LoRA", LoRAConfig),
    ("adapter catalog", CatalogConfig),
    ("KV tiers", KVTierConfig),
    ("KV events", KVEventsConfig),
    ("structured outputs", StructuredOutputsConfig),
    ("speculation", SpeculativeConfig),
    ("limits", LimitsConfig),
    ("server", ServerConfig),
    ("fleet", FleetConfig),
    ("log", LogConfig),
)
POSITIONAL = {"model"}
METAVARS = {"bytes": "SIZE", "count": "N", int: "N", float: "X"}


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every config class, grouped; nothing is set that was not given."""
    for title, config in GROUPS:
        group = parser.add_argument_group(title)
        hints = get_type_hints(config)
        for field in fields(config):
            if field.name in POSITIONAL:
                parser.add_argument(
                    field.name,
                    nargs="?",
                    metavar=field.name.upper(),
                    default=argparse.SUPPRESS,
                    help=field.metadata["help"],
                )
                group.add_argument(
                    f"--{field.name}",
                    dest=f"{field.name}_flag",
                    metavar=field.name.upper(),
                    default=argparse.SUPPRESS,
                    help=f"The same as {field.name.upper()}.",
                )
            else:
                _add_flag(group, field, hints[field.name])


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's part of what was given.

    Raises:
        ConfigError: a part cannot be, with a line for each such part; or two contradict each other.
    """
    refusals = Refusals()
    parts = {}
    for name, config in engine_parts().items():
        with refusals.noted():
            parts[name] = _part(config, args)
    refusals.raise_noted()
    return with_ranks_of_nodes(EngineConfig(**parts))


def server_config(args: argparse.Namespace) -> ServerConfig:
    return _part(ServerConfig, args)


def fleet_config(args: argparse.Namespace) -> FleetConfig:
    return _part(FleetConfig, args)


def catalog_config(args: argparse.Namespace) -> CatalogConfig:
    return _part(CatalogConfig, args)


def _part(config: type[Config], args: argparse.Namespace) -> Config:
    given = vars(args)
    chosen = {field.name: given[field.name] for field in fields(config) if field.name in given}
    for name in POSITIONAL.intersection(field.name for field in fields(config)):
        by_flag = given.get(f"{name}_flag")
        if by_flag is not None and chosen.setdefault(name, by_flag) != by_flag:
            raise ConfigError(f"{chosen[name]} and --{name} {by_flag}: name one {name}")
    as_tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()}
    part: Config = config(**as_tuples)
    return part


def _add_flag(group: Any, field: Field[Any], hint: Any) -> None:
    metadata = field.metadata
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
    if hint is bool and not field.default:
        options["action"] = "store_true"
    elif hint is bool or bool in get_args(hint):
        options["action"] = argparse.BooleanOptionalAction
    elif metadata.get("repeat"):
        options["action"] = "extend" if metadata["repeat"] == "nargs" else "append"
        options["metavar"] = metadata["metavar"]
        if metadata["repeat"] == "nargs":
            options["nargs"] = "+"
    elif "choices" in metadata:
        options["choices"] = (*metadata["choices"], *metadata.get("spellings", ()))
    else:
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        options["type"] = kinds[0] if kinds else hint
        quantity = metadata.get("quantity")
        default = METAVARS.get(quantity or options["type"], "TEXT")
        options["metavar"] = metadata.get("metavar", default)
        if quantity:
            options["type"] = reader(READERS[quantity])
    names = ("--" + flag_name(field), *metadata.get("aliases", ()))
    group.add_argument(*names, dest=field.name, **options)


def _help(field: Field[Any]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    if field.default in (None, (), "", False):
        return text
    default: Any = "on" if field.default is True else field.default
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    if field.metadata.get("quantity") == "bytes":
        default = shown_size(default)
    return f"{text} (default: {default})"
