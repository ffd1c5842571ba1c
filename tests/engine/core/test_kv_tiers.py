from __future__ import annotations

import pytest

from lora_serve.config import KVTierConfig
from lora_serve.engine.core.kv_tiers import PendingResets, StaleVersions
from lora_serve.errors import NotForgottenError
from lora_serve.fuzz.oracle.engine import OracleClock, OracleEngine
from lora_serve.fuzz.oracle.tier_store import OracleTierStore
from lora_serve.identity import EVERYTHING, AdapterRef, Everything
from lora_serve.kv.tiered_connector import TieredConnector
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.messages import CallReply, ResetPrefixCache, RestoreAdapters, UnloadAdapter
from lora_serve.scheduler.request import Request

PROMPT = list(range(10, 110))


@pytest.fixture
def clock() -> OracleClock:
    return OracleClock()


@pytest.fixture
def resets(clock: OracleClock) -> PendingResets:
    return PendingResets(8.0, clock)


def test_a_reset_ends_when_all_tiers_have_forgotten(resets: PendingResets) -> None:
    forgetting = Forgetting(("ram", "disk"))
    resets.add(CallReply(7), forgetting)
    assert resets.next_due == 8.0
    forgetting.confirm("ram")
    assert resets.take_ended() == []
    forgetting.confirm("disk")
    assert resets.take_ended() == [CallReply(7)]
    assert resets.take_ended() == []
    assert resets.next_due is None


def refusal(resets: PendingResets) -> str:
    """What the one call that has ended is told, which has not succeeded."""
    (reply,) = resets.take_ended()
    assert reply.call_id == 7
    assert reply.error is not None
    assert reply.error.kind == NotForgottenError.__name__
    return reply.error.message


def test_a_reset_ends_at_once_when_a_tier_cannot_forget_and_says_so(resets: PendingResets) -> None:
    forgetting = Forgetting(("disk", "redis"))
    resets.add(CallReply(7), forgetting)
    forgetting.confirm("disk")
    forgetting.failed("redis", "Redis: connection refused")
    message = refusal(resets)
    assert "not yet forgotten by redis (Redis: connection refused)" in message
    assert "disk" not in message
    assert "repeat the call until it succeeds" in message


def test_a_reset_ends_at_its_deadline_when_a_tier_is_silent(
    resets: PendingResets, clock: OracleClock
) -> None:
    resets.add(CallReply(7), Forgetting(("disk",)))
    clock.now = 7.9
    assert resets.take_ended() == []
    clock.now = 8.0
    assert "disk (it has not answered yet)" in refusal(resets)


class AnswersBeforeTheTiers(TieredConnector[Request]):
    def reset(self, lora_name: str | Everything) -> tuple[list[Request], Forgetting]:
        waiting, _ = super().reset(lora_name)
        return waiting, Forgetting()


@pytest.mark.parametrize("lora_name", ["a", EVERYTHING])
@pytest.mark.parametrize("connector", [TieredConnector, AnswersBeforeTheTiers])
def test_a_reset_that_was_answered_is_not_undone_by_a_kill(
    connector: type[TieredConnector[Request]], lora_name: str | Everything
) -> None:
    """Generations begin at 0 again with every server, so the tiers must have forgotten."""
    store = OracleTierStore()
    engine = OracleEngine(store=store, connector_class=connector)
    engine.load("a", "/a", "one")
    engine.run()
    engine.add("before", PROMPT, lora_name="a")
    engine.run()
    store.holds_drops = True
    engine.core.handle(ResetPrefixCache(901, lora_name))
    engine.run()
    is_answered = engine.calls[901].error is None

    restarted = OracleEngine(store=store.restarted())
    restarted.load("a", "/a", "one")
    restarted.run()
    restarted.add("after", PROMPT, lora_name="a")
    restarted.run()
    is_undone = restarted.num_cached("after") > 0
    assert (is_answered and is_undone) == (connector is AnswersBeforeTheTiers)


def test_a_reset_is_answered_when_the_store_has_forgotten() -> None:
    engine = OracleEngine(store=OracleTierStore())
    engine.core.handle(ResetPrefixCache(901))
    engine.step()
    assert engine.calls[901].error is None
    assert engine.core.idle_seconds is None


def digests(store: OracleTierStore) -> set[bytes]:
    return {namespace.digest for namespace in store.namespaces.values()}


def replace_a_version(engine: OracleEngine) -> bytes:
    """Have "a" answer as one version and then as another, whose digest is returned."""
    for content in ("one", "two"):
        engine.load("a", "/a", content, inplace=True)
        engine.run()
        engine.add(content, PROMPT, lora_name="a")
        engine.run()
    current = engine.core.adapters.current("a")
    assert current is not None
    return current.digest


KEEPS_100_SECONDS = KVTierConfig(kv_stale_version_seconds=100)


@pytest.mark.parametrize("is_unloaded", [False, True])
def test_the_kv_of_replaced_versions_leaves_the_tiers_after_a_while(is_unloaded: bool) -> None:
    store = OracleTierStore()
    engine = OracleEngine(store=store, kv_tiers=KEEPS_100_SECONDS)
    latest = replace_a_version(engine)
    if is_unloaded:
        engine.core.handle(UnloadAdapter(902, "a"))
    engine.clock.now += 90
    engine.step()
    assert len(digests(store)) == 2
    engine.clock.now += 20
    engine.step()
    assert digests(store) == {latest}


def test_an_engine_that_replaces_a_dead_one_drops_the_kv_of_replaced_versions() -> None:
    store = OracleTierStore()
    dead = OracleEngine(store=store, kv_tiers=KEEPS_100_SECONDS)
    latest = replace_a_version(dead)
    store = store.restarted()
    engine = OracleEngine(store=store, kv_tiers=KEEPS_100_SECONDS)
    engine.core.handle(RestoreAdapters(tuple(dead.core.adapters.infos()), {}))
    assert len(digests(store)) == 2
    engine.clock.now += 110
    engine.step()
    assert digests(store) == {latest}


class Moment(float):
    """Knows how often moments were compared."""

    num_compared = 0

    def __add__(self, seconds: float) -> Moment:
        return Moment(float(self) + seconds)

    def __le__(self, other: float) -> bool:
        Moment.num_compared += 1
        return float(self) <= other


def test_a_step_does_not_look_through_all_names_for_stale_versions(clock: OracleClock) -> None:
    stale = StaleVersions(100, lambda: Moment(clock.now))
    refs = [AdapterRef(f"name {number}", b"d") for number in range(1000)]
    begin = clock.now
    for number, ref in enumerate(refs):
        clock.now = begin + number
        stale.published(ref)
    clock.now = begin + 102
    Moment.num_compared = 0
    assert stale.take_due() == refs[:3]
    assert stale.take_due() == []
    assert Moment.num_compared == 5
