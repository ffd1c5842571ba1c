"""The program takes the command lines of docs/deployment.md, and they mean what the page says."""

from __future__ import annotations

import getpass
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_serve.cli.arguments import add_config_arguments, engine_config, server_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.config import EngineConfig, ServerConfig
from lora_serve.kv_tiers.mac import MacKeys, read_mac_keys
from lora_serve.kv_tiers.secret_files import redis_password
from lora_serve.server.http.keys import read_keys
from lora_serve.server.routes import OPERATIONS, Access

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


def block(title: str, language: str) -> str:
    """The first block of code in that language."""
    return section(title).split(f"```{language}\n")[1].split("```")[0]


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(block(TENANTS, "yaml")))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A directory in which the commands of the section on keys have run."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    script = block("Keys", "bash").replace("/etc/lora-serve", str(tmp_path))
    script = script.replace("owner=lora-serve", f"owner={getpass.getuser()}")
    subprocess.run(["bash", "-euc", script], check=True, timeout=30)
    return tmp_path


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
    assert engine.model.served_model_name, "the model's name would be its path"


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


def test_the_keys_that_the_page_makes_are_taken(keys: Path) -> None:
    config = ServerConfig(
        api_key_file=str(keys / "tenants.keys"), admin_api_key_file=str(keys / "admin.keys")
    )
    read = read_keys(config)
    assert (len(read.api), len(read.admin)) == (2, 1)
    assert len({*read.api, *read.admin}) == 3
    key_id, _ = read_mac_keys(str(keys / "kv.keys")).sign(b"", b"")
    assert key_id != MacKeys().sign(b"", b"")[0]
    password = redis_password(str(keys / "redis.key"))
    assert f"requirepass {password}\n" in (keys / "redis.conf").read_text()
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o400}


def test_every_secret_of_the_second_set_up_is_made_and_given_to_its_service(keys: Path) -> None:
    page = compose()
    made = {f"/etc/lora-serve/{path.name}" for path in keys.iterdir()}
    assert {secret["file"] for secret in page["secrets"].values()} <= made
    for service in page["services"].values():
        named = set(re.findall(r"/run/secrets/(\S+)", service.get("command", "")))
        assert named == set(service.get("secrets", ()))
        assert named <= set(page["secrets"])
        if named:
            assert "owner=" + service["user"] in section("Keys")
    assert "./nginx.conf" in page["services"]["gateway"]["volumes"][0]
    assert "proxy_pass http://lora-serve:8000;" in block(TENANTS, "nginx")


def passes(path: str) -> bool:
    """Whether the page's gateway hands the path on: a pattern goes before a prefix."""
    config = block(TENANTS, "nginx")
    refused = re.findall(r"location ~ (\S+) \{ return 404; \}", config)
    prefixes = re.findall(r"location (/\S*) \{\n\s+proxy_pass", config)
    return not any(re.search(each, path) for each in refused) and path.startswith(tuple(prefixes))


def test_the_gateway_passes_what_tenants_use_and_nothing_that_changes_the_server() -> None:
    closed = {each.path for each in OPERATIONS if each.access in (Access.ADMIN, Access.OPERATOR)}
    for path in closed:
        assert not passes(path.format(lora_name="tenant-a")), path
    assert passes("/v1/chat/completions")
    assert passes("/v1/models")
    assert not passes("/v1/loras/")


def test_redis_evicts_what_expires_alone(keys: Path) -> None:
    """Blocks do; the little that leads to them does not, and lora_serve counts on it."""
    policy = "maxmemory-policy volatile-lru"
    assert policy in (keys / "redis.conf").read_text()
    assert policy in (PAGE.parent / "cache.md").read_text()


@pytest.mark.parametrize("title", [TRUSTED, TENANTS])
def test_prometheus_asks_the_port_of_the_metrics(title: str) -> None:
    _, server = parsed(title)
    (job,) = yaml.safe_load(section(title).rpartition("```yaml\n")[2].split("```")[0])[
        "scrape_configs"
    ]
    (target,) = job["static_configs"][0]["targets"]
    assert target.endswith(f":{server.metrics_port}")
