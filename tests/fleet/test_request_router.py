"""The router that Ray Serve runs, told by hand what Ray Serve tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="NO ROUTER TESTED: Ray Serve is missing (extra fleet)")

from lora_serve.fleet.prefixes import CHUNK_BYTES, prefix_hashes
from lora_serve.fleet.request_router import FleetRequestRouter
from lora_serve.fleet.routing import RoutingRequest

PROMPT = prefix_hashes(b"p" * CHUNK_BYTES * 20)
DRAINING = {"is_draining": True}


def running(name: str, **stats: object) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def router_of(monkeypatch: pytest.MonkeyPatch, *replicas: Any) -> FleetRequestRouter:
    """A router of these replicas, without what Ray Serve does besides."""
    for base in FleetRequestRouter.__mro__[1:]:
        for name in ("update_replicas", "on_send_request", "on_replica_actor_died"):
            if name in vars(base):
                monkeypatch.setattr(base, name, lambda *_: None)
    router = FleetRequestRouter.__new__(FleetRequestRouter)
    router.initialize_state(policy="affinity", is_alone=True)
    router.update_replicas([*replicas])
    return router


async def chosen(
    router: FleetRequestRouter, replicas: list[Any], request: RoutingRequest
) -> list[str]:
    pending: Any = SimpleNamespace(args=[request])
    ranks = await router.choose_replicas(replicas, pending)
    assert all(len(rank) == 1 for rank in ranks), "Ray Serve would choose within a rank"
    return [rank[0].replica_id.unique_id for rank in ranks]


async def test_a_replica_is_chosen_by_what_it_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [running("r0"), running("r1", versions={"a": "1"}), running("r2", **DRAINING)]
    router = router_of(monkeypatch, *replicas)
    assert await chosen(router, replicas, RoutingRequest("a")) == ["r1", "r0"]
    replicas[1] = running("r1", **DRAINING)
    router.update_replicas(replicas)
    assert await chosen(router, replicas, RoutingRequest("a")) == ["r0"]


async def test_a_replica_that_cannot_have_an_adapter_is_asked_only_if_none_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = [running("r0", versions={"a": "1"}, unable=["a"]), running("r1")]
    router = router_of(monkeypatch, *replicas)
    assert await chosen(router, replicas, RoutingRequest("a")) == ["r1"]
    assert len(await chosen(router, replicas, RoutingRequest("b"))) == 2
    replicas[1] = running("r1", unable=["a"])
    router.update_replicas(replicas)
    assert len(await chosen(router, replicas, RoutingRequest("a"))) == 2, "one says why it cannot"


async def test_a_new_version_ends_the_credit_of_old_prefixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = [running("r0", versions={"a": "1"}), running("r1", versions={"a": "1"})]
    router = router_of(monkeypatch, *replicas)
    request = RoutingRequest("a", "", PROMPT)
    (first, *_) = await chosen(router, replicas, request)
    assert router._router.knowledge(request).lengths == {first: len(PROMPT)}
    replicas[0] = running("r0", versions={"a": "2"})
    router.update_replicas(replicas)
    assert router._router.knowledge(request).lengths == {}


async def test_when_no_replica_can_take_it_one_is_asked_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = [running("r0", **DRAINING), running("r1", **DRAINING)]
    router = router_of(monkeypatch, *replicas)
    assert {*await chosen(router, replicas, RoutingRequest("a"))} == {"r0", "r1"}
    has_failed = RoutingRequest("a", excluded=frozenset({"r0"}))
    assert await chosen(router, replicas, has_failed) == ["r1"]
    replicas = [running("r0"), running("r1")]
    router.update_replicas(replicas)
    excluded = RoutingRequest("a", excluded=frozenset({"r0", "r1"}))
    assert await chosen(router, replicas, excluded)
    assert await chosen(router, replicas, RoutingRequest(only="gone"))


async def test_load_is_what_was_sent_and_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [running("r0"), running("r1")]
    router = router_of(monkeypatch, *replicas)
    for _ in range(3):
        router.on_send_request(replicas[0].replica_id)
    assert await chosen(router, replicas, RoutingRequest()) == ["r1", "r0"]
    for _ in range(5):  # of two it did not hear when they were sent
        router.on_request_completed(replicas[0].replica_id, "id")
    router.on_send_request(replicas[1].replica_id)
    assert await chosen(router, replicas, RoutingRequest()) == ["r0", "r1"]


async def test_a_dead_replica_is_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [running("r0"), running("r1")]
    router = router_of(monkeypatch, *replicas)
    router.on_send_request(replicas[0].replica_id)
    router.on_replica_actor_died(replicas[0].replica_id)
    router.on_request_completed(replicas[0].replica_id, "id")
    assert await chosen(router, replicas, RoutingRequest()) == ["r1"]
