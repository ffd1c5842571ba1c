from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_serve.config import (
    CacheConfig,
    CatalogConfig,
    EngineConfig,
    FleetConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    ServerConfig,
)
from lora_serve.engine.frontend import rank_checks
from lora_serve.errors import ConfigError
from lora_serve.fleet import local
from lora_serve.ops.cpu import numa

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
        local.check_fleet(EngineConfig(), ServerConfig(), FleetConfig())


def test_replicas_take_no_port_for_metrics() -> None:
    with pytest.raises(ConfigError, match="--metrics-port does not go with --replicas"):
        local.check_fleet(EngineConfig(), ServerConfig(metrics_port=9000), FleetConfig())


def test_replicas_publish_no_kv_events_at_one_address() -> None:
    events = KVEventsConfig(kv_events_enable_kv_cache_events=True)
    with pytest.raises(ConfigError, match="--kv-events-config does not go with --replicas"):
        local.check_fleet(EngineConfig(kv_events=events), ServerConfig(), FleetConfig())


@pytest.mark.parametrize(
    ("given", "ranks", "threads"), [(None, 1, 3), (5, 1, 5), (None, 2, 1), (2, 2, 2)]
)
def test_replicas_share_the_machine_unless_told_their_part(
    given: int | None, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "default_num_threads", lambda: 14)
    engine = EngineConfig(
        model=ModelConfig(model="m", cpu_threads=given),
        parallel=ParallelConfig(tensor_parallel_size=ranks),
    )
    shared = local.shared_out(engine, FleetConfig(replicas=2, max_replicas=4))
    assert shared.model.cpu_threads == threads


@pytest.mark.parametrize(("device", "share"), [("cpu", 0.2), ("auto", 0.2), ("cuda", 0.8)])
def test_replicas_take_no_more_memory_together_than_one_server(device: str, share: float) -> None:
    engine = EngineConfig(
        model=ModelConfig(device=device), cache=CacheConfig(gpu_memory_utilization=0.8)
    )
    shared = local.shared_out(engine, FleetConfig(replicas=2, max_replicas=4))
    assert shared.cache.gpu_memory_utilization == pytest.approx(share)


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        ({"tensor_parallel_size": 4}, "2 replicas of --tensor-parallel-size 4 are 8 ranks, above"),
        ({"cpu_ranks": "auto"}, "--cpu-ranks auto does not go with --replicas"),
    ],
)
def test_ranks_of_replicas_have_a_core_each(
    parallel: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "default_num_threads", lambda: 7)
    monkeypatch.setattr(numa, "default_num_threads", lambda: 7)
    engine = EngineConfig(parallel=ParallelConfig(**parallel))
    with pytest.raises(ConfigError, match=told):
        local.check_fleet(engine, ServerConfig(), FleetConfig(replicas=2))


def test_ranks_of_replicas_on_gpus_have_a_card_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Ray would wait for ever for cards that there are not."""
    monkeypatch.setattr(local, "num_cards", lambda: 3)
    for ranks, replicas in ((2, 2), (1, 4)):
        engine = EngineConfig(
            model=ModelConfig(device="cuda"), parallel=ParallelConfig(tensor_parallel_size=ranks)
        )
        told = f"{replicas} replicas of --tensor-parallel-size {ranks} are 4 ranks, above the 3 GPU"
        with pytest.raises(ConfigError, match=told):
            local.check_fleet(engine, ServerConfig(), FleetConfig(replicas=replicas))
    engine = EngineConfig(
        model=ModelConfig(device="cuda"), parallel=ParallelConfig(tensor_parallel_size=2)
    )
    deployments = pytest.importorskip("lora_serve.fleet.deployments")
    assert deployments.reserved(engine) == {"num_cpus": 1, "num_gpus": 2}


def test_where_there_are_gpus_replicas_reserve_them_without_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--device auto computes on them, and all replicas would do so on the first one."""
    deployments = pytest.importorskip("lora_serve.fleet.deployments")
    started: list[EngineConfig] = []

    @contextlib.contextmanager
    def start(engine: EngineConfig, *_: object) -> Iterator[object]:
        started.append(engine)
        raise ConfigError("started")
        yield

    monkeypatch.setattr(local, "local_replicas", start)
    for device, cards, gpus in (("auto", 2, 1), ("cuda", 2, 1), ("auto", 0, 0), ("cpu", 2, 0)):
        monkeypatch.setattr(local, "num_cards", lambda cards=cards: cards)
        engine, fleet = EngineConfig(model=ModelConfig(device=device)), FleetConfig(replicas=2)
        local.check_fleet(engine, ServerConfig(), fleet)
        with pytest.raises(ConfigError, match="started"):
            local.serve_replicas(engine, ServerConfig(), fleet, CatalogConfig(), None)  # type: ignore[arg-type]
        assert deployments.reserved(started[-1]).get("num_gpus", 0) == gpus, device
    monkeypatch.setattr(local, "num_cards", lambda: 1)
    with pytest.raises(
        ConfigError, match=r"above the 1 GPU that torch sees; lower .* --device cpu"
    ):
        local.check_fleet(EngineConfig(), ServerConfig(), FleetConfig(replicas=2))


FAILED = """A replica failed to start with exception. Retrying 0 more time(s). Error:
ray::ServeReplica.initialize_and_get_metadata()
ValueError: of another error
  File "engine.py", line 5, in start
RuntimeError: Traceback (most recent call last):
lora_serve.errors.ConfigError: --block-size 16 is one line
and this another
"""


@pytest.mark.parametrize(
    ("message", "told"),
    [(FAILED, "--block-size 16 is one line\nand this another"), ("", "deploying failed")],
)
def test_a_replica_that_cannot_be_started_is_tried_once_and_says_why(
    message: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = pytest.importorskip("ray.serve")
    started: list[Any] = []

    def run(application: Any, **_: object) -> None:
        started.append(application)
        raise RuntimeError("deploying failed")

    replica = SimpleNamespace(message=message)
    status = SimpleNamespace(
        applications={"lora-serve": SimpleNamespace(deployments={"replica": replica})}
    )
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(serve, "status", lambda: status)
    parts = EngineConfig(), ServerConfig(), FleetConfig(replicas=2), CatalogConfig()
    with pytest.raises(ConfigError) as refused, local.local_replicas(*parts):
        pass
    assert str(refused.value) == f"the replicas cannot be started: {told}"
    config = started[0]._bound_deployment._deployment_config
    assert config.max_constructor_retry_count == 1


def test_what_an_end_cuts_off_of_ray_is_no_line_of_the_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors that Ray tells of before its end are."""
    serve = pytest.importorskip("ray.serve")
    from ray._private import worker

    def shut_down() -> None:
        worker.print_to_stdstream(
            {"lines": ["Task graceful_shutdown failed."], "pid": "raylet", "is_err": False},
            ignore_prefix=False,
        )

    monkeypatch.setattr(serve, "shutdown", shut_down)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    local._end_ray()
    assert capsys.readouterr() == ("", "")
    shut_down()
    assert "Task graceful_shutdown failed." in capsys.readouterr().out


def test_no_torch_is_imported_to_find_that_there_is_no_driver_of_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_checks, "GPU_DRIVERS", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert local.num_cards() == 0
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(ImportError):
        local.num_cards()


def test_ray_has_the_cpus_that_all_replicas_reserve() -> None:
    """Else it would start none of the last ones, and wait for ever."""
    deployments = pytest.importorskip("lora_serve.fleet.deployments")
    engine = EngineConfig(
        model=ModelConfig(cpu_threads=8), parallel=ParallelConfig(tensor_parallel_size=2)
    )
    fleet = FleetConfig(replicas=2, max_replicas=3)
    assert deployments.reserved(engine) == {"num_cpus": 16}
    assert local.num_cpus(engine, fleet) >= 3 * 16


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
