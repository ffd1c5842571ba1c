from __future__ import annotations

import subprocess
import sys

import pytest

from lora_serve.config import EngineConfig, FleetConfig, KVEventsConfig, ModelConfig, ServerConfig
from lora_serve.errors import ConfigError
from lora_serve.fleet import local

HELP = """
import sys
from lora_serve.cli.main import main
try:
    main(["serve", "--help"])
except SystemExit:
    pass
print([name for name in ("ray", "torch", "fastapi") if name in sys.modules])
"""


def test_help_tells_of_replicas_and_imports_no_ray() -> None:
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "--replicas" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_replicas_without_ray_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'lora-serve\[fleet\]'"):
        local.check_fleet(EngineConfig(), ServerConfig())


def test_replicas_take_no_port_for_metrics() -> None:
    with pytest.raises(ConfigError, match="--metrics-port does not go with --replicas"):
        local.check_fleet(EngineConfig(), ServerConfig(metrics_port=9000))


def test_replicas_publish_no_kv_events_at_one_address() -> None:
    events = KVEventsConfig(kv_events_enable_kv_cache_events=True)
    with pytest.raises(ConfigError, match="--kv-events-config does not go with --replicas"):
        local.check_fleet(EngineConfig(kv_events=events), ServerConfig())


@pytest.mark.parametrize(("given", "threads"), [(None, 3), (5, 5)])
def test_replicas_share_the_machine_unless_told_their_part(
    given: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "default_num_threads", lambda: 14)
    engine = EngineConfig(model=ModelConfig(model="m", cpu_threads=given))
    shared = local.shared_out(engine, FleetConfig(replicas=2, max_replicas=4))
    assert shared.model.cpu_threads == threads


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"replicas": 0}, "--replicas 0 must be at least 1"),
        ({"replicas": 3, "max_replicas": 2}, "--max-replicas 2 is below the 3"),
        ({"target_ongoing_requests": 0.0}, "--target-ongoing-requests 0.0 must be above 0"),
        ({"num_ingresses": 0}, "--num-ingresses 0 must be at least 1"),
        ({"routing_policy": "best"}, "--routing-policy best must be one of affinity"),
    ],
)
def test_flags_that_cannot_be_are_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FleetConfig(**fields)
