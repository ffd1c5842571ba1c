from __future__ import annotations

import pytest

from lora_serve.fleet.prefixes import CHUNK_BYTES, prefix_hashes
from lora_serve.fleet.replicas import ReplicaReport
from lora_serve.fleet.routing import (
    FREE_LOAD,
    POLICIES,
    Knowledge,
    Router,
    RoutingRequest,
    least_loaded,
    round_robin,
)
from lora_serve.identity import BASE_MODEL, EVERYTHING

NAMES = ("r0", "r1", "r2")
LONG = prefix_hashes(b"p" * CHUNK_BYTES * 20)


def fleet(router: Router, **reports: ReplicaReport) -> Router:
    """Three replicas, idle and with nothing in memory unless told."""
    for name in NAMES:
        router.update(name, reports.get(name, ReplicaReport()))
    return router


def test_an_adapter_is_answered_where_it_is_on_the_device_rather_than_in_memory() -> None:
    router = fleet(
        Router(),
        r1=ReplicaReport(in_memory=frozenset("a")),
        r2=ReplicaReport(on_device=frozenset("a")),
    )
    assert router.choose(RoutingRequest("a"))[:2] == ["r2", "r1"]


def test_a_replica_that_has_not_heard_of_a_name_comes_after_one_that_has() -> None:
    unaware = ReplicaReport(known=frozenset())
    router = fleet(Router(), r0=unaware, r1=unaware, r2=ReplicaReport(known=frozenset("a")))
    assert router.choose(RoutingRequest("a"))[0] == "r2"


def test_a_replica_that_cannot_get_an_adapter_gets_no_request_for_it() -> None:
    unable = ReplicaReport(unable=frozenset("a"))
    router = fleet(Router(), r0=unable, r1=unable)
    assert router.choose(RoutingRequest("a")) == ["r2"]
    assert sorted(router.choose(RoutingRequest("b"))) == [*NAMES]
    router.update("r2", unable)
    assert router.choose(RoutingRequest("a")) == []


def test_the_longest_prefix_that_was_sent_decides_among_replicas_with_the_adapter() -> None:
    with_a = ReplicaReport(on_device=frozenset("a"))
    router = fleet(Router(), r0=with_a, r1=with_a, r2=with_a)
    for name, length in (("r0", 3), ("r1", 12), ("r2", 7)):
        router.sent(RoutingRequest("a", "", LONG[:length]), name)
        router.ended(name)
    assert router.choose(RoutingRequest("a", "", LONG)) == ["r1", "r2", "r0"]


def test_a_prefix_is_worth_the_reading_of_its_adapter_only_if_it_is_long() -> None:
    for length, first in ((4, "r1"), (18, "r0")):
        router = fleet(Router(), r1=ReplicaReport(on_device=frozenset("a")))
        router.sent(RoutingRequest("a", "", LONG[:length]), "r0")
        router.ended("r0")
        for number in range(5):  # others push r0 out of what is remembered of the adapter
            router.sent(RoutingRequest("a"), f"gone{number}")
        assert router.choose(RoutingRequest("a", "", LONG))[0] == first


@pytest.mark.parametrize(
    "other",
    [
        RoutingRequest("b", "tenant", LONG),
        RoutingRequest("a", "another tenant", LONG),
        RoutingRequest(BASE_MODEL, "tenant", LONG),
        RoutingRequest("a", "tenant", prefix_hashes(b"q" + b"p" * CHUNK_BYTES * 20)),
    ],
)
def test_a_prefix_counts_for_the_same_name_tenant_and_beginning_alone(
    other: RoutingRequest,
) -> None:
    router = fleet(Router())
    same = RoutingRequest("a", "tenant", LONG)
    router.sent(same, "r1")
    assert router.knowledge(same).lengths == {"r1": len(LONG)}
    assert router.knowledge(other).lengths == {}


@pytest.mark.parametrize("what", ["a", EVERYTHING])
def test_when_a_name_is_replaced_its_old_prefixes_count_no_more(what: object) -> None:
    router = fleet(Router())
    request, other = RoutingRequest("a", "", LONG), RoutingRequest("b", "", LONG)
    router.sent(request, "r1")
    router.sent(other, "r2")
    router.replaced(what)  # type: ignore[arg-type]
    assert router.knowledge(request).lengths == {}
    assert router.knowledge(request).recent == ()
    assert bool(router.knowledge(other).lengths) is (what != EVERYTHING)
    router.sent(request, "r0")
    assert router.knowledge(request).lengths == {"r0": len(LONG)}


def test_no_forgotten_name_brings_an_old_prefix_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_serve.fleet.routing.MAX_REPLACED_NAMES", 2)
    router = fleet(Router())
    request = RoutingRequest("a", "", LONG)
    router.sent(request, "r1")
    for name in ("a", "b", "c", "d"):
        router.replaced(name)
    assert router.knowledge(request).lengths == {}


def test_a_popular_prefix_does_not_pile_up_on_one_replica() -> None:
    router = fleet(Router())
    request = RoutingRequest("a", "", LONG)
    chosen = []
    for _ in range(30):
        chosen.append(router.choose(request)[0])
        router.sent(request, chosen[-1])
    assert len(set(chosen[:FREE_LOAD])) == 1  # few requests stay together
    assert max(map(chosen.count, NAMES)) <= 13  # 1.25 times the mean, rounded up


def test_an_overloaded_replica_is_the_last_choice_even_with_all_in_its_cache() -> None:
    busy = ReplicaReport(on_device=frozenset("a"), num_running=40, num_waiting=10)
    router = fleet(Router(), r0=busy, r1=ReplicaReport(num_running=2))
    assert router.choose(RoutingRequest("a"))[-1] == "r0"


def test_adapters_that_nobody_holds_spread_and_every_router_sends_them_to_the_same() -> None:
    one, two = fleet(Router()), fleet(Router())
    homes = [one.choose(RoutingRequest(f"adapter-{number}"))[0] for number in range(64)]
    assert homes == [two.choose(RoutingRequest(f"adapter-{number}"))[0] for number in range(64)]
    assert min(map(homes.count, NAMES)) > 8


def test_a_replica_that_goes_moves_its_own_adapters_alone() -> None:
    router = fleet(Router())
    requests = [RoutingRequest(f"adapter-{number}") for number in range(64)]
    before = [router.choose(request)[0] for request in requests]
    router.remove("r1")
    after = [router.choose(request)[0] for request in requests]
    assert "r1" not in after
    assert all(now == was for was, now in zip(before, after, strict=True) if was != "r1")


def test_round_robin_gives_each_its_turn_and_least_loaded_the_fewest() -> None:
    router = fleet(Router(round_robin))
    chosen = []
    for _ in range(6):
        chosen.append(router.choose(RoutingRequest("a", "", LONG), 1)[0])
        router.sent(RoutingRequest("a", "", LONG), chosen[-1])
    assert chosen == [*NAMES, *NAMES]
    router = fleet(Router(least_loaded), r0=ReplicaReport(num_running=3))
    router.sent(RoutingRequest(), "r1")
    assert router.choose(RoutingRequest()) == ["r2", "r1", "r0"]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=[*POLICIES])
def test_a_failed_or_draining_replica_is_not_asked_again(policy: object) -> None:
    router = fleet(Router(policy), r1=ReplicaReport(is_draining=True))  # type: ignore[arg-type]
    request = RoutingRequest("a", "", LONG, frozenset({"r0"}))
    assert router.choose(request) == ["r2"]
    router.remove("r2")
    assert router.choose(request) == []
    router.ended("r2")  # of a request that it was at when it went


def test_a_lone_router_trusts_its_own_count_and_others_add_what_reports_show() -> None:
    old_report = ReplicaReport(num_running=5, num_waiting=4)
    for is_alone, load in ((True, 1), (False, 9)):
        router = Router(is_alone=is_alone)
        router.update("r0", ReplicaReport())
        router.sent(RoutingRequest(), "r0")
        router.update("r0", old_report)
        assert router.load("r0") == load


@pytest.mark.parametrize("num_replicas", [30, 2000])
def test_a_choice_looks_at_few_replicas_however_many_there_are(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router()
    for number in range(num_replicas):
        with_a = ReplicaReport(on_device=frozenset("a"))
        router.update(f"r{number}", with_a if number % 2 else ReplicaReport())
    request = RoutingRequest("a", "", LONG)
    router.sent(request, "r7")
    seen: list[str] = []
    was = Knowledge.can_take

    def counting(self: Knowledge, replica_id: str) -> bool:
        seen.append(replica_id)
        return was(self, replica_id)

    monkeypatch.setattr(Knowledge, "can_take", counting)
    assert router.choose(request)[0] == "r7"
    assert len(seen) < 30
