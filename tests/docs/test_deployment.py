"""The program takes the command lines of docs/deployment.md, and they mean what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lora_serve.cli.arguments import add_config_arguments, engine_config, server_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.config import EngineConfig, ServerConfig

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"
TRUSTED, TENANTS = "One trusted tenant", "Many tenants behind a gateway"


def section(title: str) -> str:
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def commands(text: str) -> list[str]:
    """Everything that is given to `lora-serve`, by systemd's line and by compose's."""
    joined = text.replace("\\\n", " ")
    units = re.findall(r"^ExecStart=\S*lora-serve (.*)$", joined, re.MULTILINE)
    composed = re.findall(r"command: >-\n((?:      .*\n)+)", joined)
    return [" ".join(command.split()) for command in (*units, *composed)]


def parsed(title: str) -> tuple[EngineConfig, ServerConfig]:
    (command,) = commands(section(title))
    serve, *flags = shlex.split(command)
    assert serve == "serve"
    parser = OneLineParser(allow_abbrev=False)
    add_config_arguments(parser)
    args = parser.parse_args(flags)
    return engine_config(args), server_config(args)


@pytest.mark.parametrize("title", [TRUSTED, TENANTS])
def test_a_set_up_is_one_that_the_program_takes_and_asks_for_keys(title: str) -> None:
    engine, server = parsed(title)
    assert server.api_key_file
    assert server.admin_api_key_file
    assert server.allowed_hosts
    assert server.metrics_port is not None
    assert engine.lora.lora_allowed_roots
    assert not server.allow_runtime_lora_updating


def test_one_tenants_keys_share_a_cache_behind_tls() -> None:
    _, server = parsed(TRUSTED)
    assert not server.isolates_keys
    assert server.ssl_certfile
    assert server.metrics_host == "127.0.0.1"


def test_tenants_are_kept_apart() -> None:
    engine, server = parsed(TENANTS)
    assert server.isolates_keys
    assert engine.scheduler.fair_share == "key"
    assert server.min_priority == 0
    assert engine.kv_tiers.kv_mac_key_file


@pytest.mark.parametrize("title", [TRUSTED, TENANTS])
def test_every_flag_that_a_table_explains_is_in_its_command(title: str) -> None:
    text = section(title)
    (command,) = commands(text)
    rows = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    named = {flag for row in rows for flag in re.findall(r"--[a-z][a-z-]+", row)}
    assert named <= set(re.findall(r"--[a-z][a-z-]+", command))
    assert len(named) > 5
