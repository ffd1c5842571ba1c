from __future__ import annotations

import pytest

from lora_serve.engine.kv_tiers import PendingResets
from lora_serve.errors import NotForgottenError
from lora_serve.fuzz.oracle.engine import OracleClock, OracleEngine
from lora_serve.fuzz.oracle.tier_store import OracleTierStore
from lora_serve.kv.connector import TieredConnector
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.messages import ResetPrefixCache
from lora_serve.scheduler.request import Request


@pytest.fixture
def clock() -> OracleClock:
    return OracleClock()


@pytest.fixture
def resets(clock: OracleClock) -> PendingResets:
    return PendingResets(8.0, clock)


def test_a_reset_ends_when_all_tiers_have_forgotten(resets: PendingResets) -> None:
    forgetting = Forgetting(("ram", "disk"))
    resets.add(7, forgetting)
    assert resets.next_due == 8.0
    forgetting.confirm("ram")
    assert resets.take_ended() == []
    forgetting.confirm("disk")
    assert resets.take_ended() == [(7, None)]
    assert resets.take_ended() == []
    assert resets.next_due is None


def test_a_reset_ends_at_once_when_a_tier_cannot_forget_and_says_so(resets: PendingResets) -> None:
    forgetting = Forgetting(("disk", "redis"))
    resets.add(7, forgetting)
    forgetting.confirm("disk")
    forgetting.failed("redis", "Redis: connection refused")
    ((call_id, error),) = resets.take_ended()
    assert call_id == 7
    assert isinstance(error, NotForgottenError)
    assert "not yet forgotten by redis (Redis: connection refused)" in str(error)
    assert "disk" not in str(error)
    assert "repeat the call until it succeeds" in str(error)


def test_a_reset_ends_at_its_deadline_when_a_tier_is_silent(
    resets: PendingResets, clock: OracleClock
) -> None:
    resets.add(7, Forgetting(("disk",)))
    clock.now = 7.9
    assert resets.take_ended() == []
    clock.now = 8.0
    ((_, error),) = resets.take_ended()
    assert "disk (it has not answered yet)" in str(error)


class AnswersBeforeTheTiers(TieredConnector[Request]):
    def reset(self, lora_name: str | None) -> tuple[list[Request], Forgetting]:
        waiting, _ = super().reset(lora_name)
        return waiting, Forgetting()


@pytest.mark.parametrize("lora_name", ["a", None])
@pytest.mark.parametrize("connector", [TieredConnector, AnswersBeforeTheTiers])
def test_a_reset_that_was_answered_is_not_undone_by_a_kill(
    connector: type[TieredConnector[Request]], lora_name: str | None
) -> None:
    """Generations begin at 0 again with every server, so the tiers must have forgotten."""
    store = OracleTierStore()
    engine = OracleEngine(store=store, connector_class=connector)
    prompt = list(range(10, 110))
    engine.load("a", "/a", "one")
    engine.run()
    engine.add("before", prompt, lora_name="a")
    engine.run()
    store.holds_drops = True
    engine.core.handle(ResetPrefixCache(901, lora_name))
    engine.run()
    is_answered = engine.calls[901].success

    restarted = OracleEngine(store=store.restarted())
    restarted.load("a", "/a", "one")
    restarted.run()
    restarted.add("after", prompt, lora_name="a")
    restarted.run()
    is_undone = restarted.num_cached("after") > 0
    assert (is_answered and is_undone) == (connector is AnswersBeforeTheTiers)


def test_a_reset_is_answered_when_the_store_has_forgotten() -> None:
    engine = OracleEngine(store=OracleTierStore())
    engine.core.handle(ResetPrefixCache(901))
    engine.step()
    assert engine.calls[901].success
    assert engine.core.idle_seconds is None
