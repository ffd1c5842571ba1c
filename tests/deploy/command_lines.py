"""What the files of deploy/ give to `lora-serve`, parsed as the program does."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lora_serve.cli import serve
from lora_serve.cli.arguments import catalog_config, engine_config, server_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.config import CatalogConfig, EngineConfig, ServerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "lora-serve.service"
COMPOSE = DEPLOY / "compose.yaml"
CHART = DEPLOY / "helm" / "lora-serve"


def parsed(words: Sequence[str]) -> tuple[EngineConfig, ServerConfig]:
    """The settings of `lora-serve WORDS`; a flag that there is not ends the test."""
    args = _arguments(words)
    return engine_config(args), server_config(args)


def catalog_of(words: Sequence[str]) -> CatalogConfig:
    """The same of the catalog's settings."""
    return catalog_config(_arguments(words))


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    command, *flags = words
    assert command == "serve"
    parser = OneLineParser()
    serve.add_arguments(parser)
    return parser.parse_args(flags)


def unit_command() -> str:
    """What the systemd unit gives to the program."""
    (command,) = re.findall(
        r"^ExecStart=\S*lora-serve (.*)$",
        UNIT.read_text().replace("\\\n", " "),
        re.MULTILINE,
    )
    return command


def compose(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The compose file, with its variables taken from `environment` or else their defaults."""
    text = re.sub(
        r"(?<!\$)\$\{(\w+):-([^}]*)\}",
        lambda match: (environment or {}).get(match[1], match[2]),
        COMPOSE.read_text(),
    )
    assert not re.search(r"(?<!\$)\$\{", text), "a variable without a default"
    return dict(yaml.safe_load(text))


def compose_command() -> str:
    return str(compose()["services"]["lora-serve"]["command"])


def settings(command: str) -> tuple[EngineConfig, ServerConfig]:
    return parsed(shlex.split(command))


def serve_flags() -> list[str]:
    """Every flag of `lora-serve serve`."""
    parser = OneLineParser()
    serve.add_arguments(parser)
    return [flag for flag in parser._option_string_actions if flag.startswith("--")]
