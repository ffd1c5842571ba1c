"""What device `auto` stands for on a cluster. Its GPUs are declared: none of them is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import click
import pytest

from lora_serve.config import EngineConfig, FleetConfig, ModelConfig, ParallelConfig
from lora_serve.errors import ConfigError

pytest.importorskip("ray.serve", reason="NO CLUSTER TESTED: Ray Serve is missing (extra fleet)")

from ray._private import services

from lora_serve.fleet import cluster

ON_A_RAY_WITH_GPUS = """
import json, ray, sys
from lora_serve.errors import ConfigError
from lora_serve.fleet import app

def reserved(**flags):
    try:
        ingress = app({"model": "m", "cpu_threads": 1, **flags})
    except ConfigError as error:
        return str(error)
    return ingress._bound_deployment.init_args[0]._bound_deployment.ray_actor_options

ray.init(
    "local", num_cpus=1, num_gpus=2, include_dashboard=False, object_store_memory=80 * 2**20,
    logging_level="error",
)
told = [
    reserved(replicas=2),
    reserved(replicas=1, tensor_parallel_size=2),
    reserved(replicas=3),
    reserved(replicas=3, device="cuda"),
    reserved(replicas=3, device="cpu"),
]
ray.shutdown()
json.dump(told, sys.stdout)
"""
ONE, TWO = {"num_cpus": 1, "num_gpus": 1}, {"num_cpus": 1, "num_gpus": 2}
PATIENCE_SECONDS = 120


def test_replicas_reserve_the_gpus_that_a_cluster_declares_without_being_told() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_A_RAY_WITH_GPUS],
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    pair, tensor_parallel, refused, waiting, on_cpus = json.loads(done.stdout.splitlines()[-1])
    assert (pair, tensor_parallel) == (ONE, TWO)
    assert "3 replicas need 1 GPU each, on one node, and the cluster's nodes have 2" in refused
    assert (waiting, on_cpus) == (ONE, {"num_cpus": 1})


class FakeRay:
    """A Ray that is connected to no cluster yet. nodes: the GPUs of each."""

    def __init__(self, nodes: list[int], *, dead: int = 0) -> None:
        self.asked: list[str | None] = []
        self._is_connected = False
        self._nodes = nodes
        self._dead = dead

    def is_initialized(self) -> bool:
        return self._is_connected

    def init(self, address: str | None, **_: object) -> None:
        self.asked.append(address)
        self._is_connected = True

    def shutdown(self) -> None:
        self._is_connected = False

    def nodes(self) -> list[dict[str, Any]]:
        assert self._is_connected
        alive = [{"Alive": True, "Resources": {"GPU": float(n)} if n else {}} for n in self._nodes]
        return [*alive, {"Alive": False, "Resources": {"GPU": float(self._dead)}}]


def device_on(
    ray: FakeRay, ranks: int, monkeypatch: pytest.MonkeyPatch, running: str = "head:6379"
) -> str:
    """running: the cluster that was started on this machine, as Ray's own file names it."""
    monkeypatch.setattr(cluster, "ray", ray)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"of another server:1"})
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: running or None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=ranks))
    device = cluster.placed_on_cluster(engine, FleetConfig(replicas=2)).model.device
    assert not ray.is_initialized(), "`serve run` connects by itself, with what it was told"
    return device


@pytest.mark.parametrize(
    ("nodes", "ranks", "device"),
    [
        ([0, 0], 1, "cpu"),
        ([2], 1, "cuda"),
        ([0, 1, 1], 1, "cuda"),
        ([1], 1, ""),
        ([3, 3], 2, "cuda"),
        ([3, 1], 2, ""),  # a replica's ranks share a node
    ],
)
def test_auto_takes_the_gpus_of_the_nodes_or_asks(
    nodes: list[int], ranks: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device:
        assert device_on(FakeRay(nodes, dead=8), ranks, monkeypatch) == device
        return
    with pytest.raises(ConfigError, match="say device=cuda to wait for more GPUs, device=cpu"):
        device_on(FakeRay(nodes, dead=8), ranks, monkeypatch)


def test_the_cluster_is_asked_that_serve_run_will_connect_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay([2])
    with click.Context(click.Command("run")) as context:
        for address in ("ray://head:10001", "10.0.0.1:6379", None):
            context.params = {"address": address}
            device_on(ray, 1, monkeypatch)
    device_on(ray, 1, monkeypatch)
    assert ray.asked == ["ray://head:10001", "10.0.0.1:6379", None, None]


@pytest.mark.parametrize(("cards", "device"), [(0, "cpu"), (2, "cuda")])
def test_where_no_cluster_runs_ray_will_start_on_this_machine(
    cards: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Ray of another server with --replicas is none of this one's."""
    ray = FakeRay([8])
    monkeypatch.setattr(cluster, "num_cards", lambda: cards)
    assert device_on(ray, 1, monkeypatch, running="") == device
    assert not ray.asked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_was_named_asks_no_cluster(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay([2])
    monkeypatch.setattr(cluster, "ray", ray)
    engine = EngineConfig(model=ModelConfig(device=device))
    assert cluster.placed_on_cluster(engine, FleetConfig(replicas=9)) is engine
    assert not ray.asked
