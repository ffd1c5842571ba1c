"""docs/deployment.md agrees with the files of deploy/ that it explains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.command_lines import compose_command, settings, unit_command

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"
TRUSTED, TENANTS = "One trusted tenant", "Many tenants behind a gateway"
COMMANDS = {TRUSTED: unit_command(), TENANTS: compose_command()}


def section(title: str) -> str:
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("title", COMMANDS)
def test_a_set_up_is_one_that_the_program_takes_and_asks_for_keys(title: str) -> None:
    engine, server = settings(COMMANDS[title])
    assert server.api_key_file
    assert server.admin_api_key_file
    assert server.allowed_hosts
    assert server.metrics_port is not None
    assert engine.lora.lora_allowed_roots
    assert not server.allow_runtime_lora_updating
    assert engine.model.served_model_name, "the model's name would be its path"


def test_one_tenants_keys_share_a_cache_behind_tls() -> None:
    _, server = settings(COMMANDS[TRUSTED])
    assert not server.isolates_keys
    assert server.ssl_certfile
    assert server.metrics_host == "127.0.0.1"


def test_tenants_are_kept_apart() -> None:
    engine, server = settings(COMMANDS[TENANTS])
    assert server.isolates_keys
    assert engine.scheduler.fair_share == "key"
    assert server.min_priority == 0
    assert engine.kv_tiers.kv_mac_key_file


@pytest.mark.parametrize("title", COMMANDS)
def test_every_flag_that_a_table_explains_is_in_its_command(title: str) -> None:
    rows = re.findall(r"^\| (.*?) \|", section(title), re.MULTILINE)
    named = {flag for row in rows for flag in re.findall(r"--[a-z][a-z-]+", row)}
    assert named <= set(re.findall(r"--[a-z][a-z-]+", COMMANDS[title]))
    assert len(named) > 5


def test_prometheus_asks_the_port_of_the_metrics() -> None:
    _, server = settings(COMMANDS[TRUSTED])
    block = section(TRUSTED).rpartition("```yaml\n")[2].split("```")[0]
    (job,) = yaml.safe_load(block)["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.endswith(f":{server.metrics_port}")


def test_redis_evicts_what_expires_alone() -> None:
    """Blocks do; the little that leads to them does not, and lora_serve counts on it."""
    policy = "maxmemory-policy volatile-lru"
    assert policy in (PAGE.parents[1] / "deploy" / "make-secrets").read_text()
    assert policy in (PAGE.parent / "cache.md").read_text()
