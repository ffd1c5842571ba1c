from __future__ import annotations

from lora_serve.fuzz.oracle.engine import OracleClock, OracleEngine
from lora_serve.fuzz.oracle.tier_store import OracleTierStore
from lora_serve.identity import BlockHash
from lora_serve.kv.touches import RecentTouches

A, B, C = (BlockHash(bytes([i]) * 32) for i in range(3))


def test_a_prefix_is_told_of_once_in_a_while() -> None:
    clock = OracleClock()
    touches = RecentTouches(clock, seconds=30.0)
    assert [touches.is_due(one) for one in (A, B, A)] == [True, True, False]
    clock.now = 29.0
    assert not touches.is_due(A)
    clock.now = 30.0
    assert touches.is_due(A)
    clock.now = 59.0
    assert not touches.is_due(A)


def test_only_so_many_are_remembered() -> None:
    touches = RecentTouches(OracleClock(), most=2)
    assert [touches.is_due(one) for one in (A, B, C, B, A)] == [True, True, True, False, True]


def test_what_the_device_cache_had_is_kept_young_in_the_tiers() -> None:
    store = OracleTierStore()
    engine = OracleEngine(store=store)
    for name in ("computes", "hits", "hits again"):
        engine.add(name, list(range(10, 110)), max_tokens=1)
        engine.run()
        assert len(store.touched) == (name != "computes")
    (told,) = store.touched
    (blocks,) = store.blocks.values()
    assert told == tuple(blocks)[: len(told)]
    assert len(told) == engine.num_cached("hits") // 16
