"""An answer to do_remote_decode waits for its prompt's KV, and for no longer than it is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lora_serve.config import KVTierConfig
from lora_serve.engine.core.handover import AnswersInHandover
from lora_serve.fuzz.oracle.engine import BLOCK_SIZE, OracleEngine
from lora_serve.fuzz.oracle.grammars import toy_constraint
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.fuzz.oracle.tier_store import OracleTierStore
from lora_serve.kv.connector import KVConnector
from lora_serve.kv_tiers.base import TierNamespace
from lora_serve.messages import AbortRequests, EngineOutput
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.request import Request

PROMPT = list(range(8, 8 + 4 * BLOCK_SIZE + 1))


@dataclass
class LateStore(OracleTierStore):
    """Says that it has saved something when a test wants it to."""

    unsaid: list[Callable[[], None]] = field(default_factory=list)

    def _note_saved(self, namespace: TierNamespace, block_hash: object) -> None:
        self.unsaid.append(lambda: OracleTierStore._note_saved(self, namespace, block_hash))  # type: ignore[arg-type]

    def say(self) -> None:
        for say in self.unsaid:
            say()
        self.unsaid = []


def engine_over(store: OracleTierStore, role: str = "kv_both", policy: str = "all") -> OracleEngine:
    tiers = KVTierConfig(kv_role=role, kv_store_policy=policy)
    return OracleEngine(store=store, kv_tiers=tiers, max_num_batched_tokens=40)


def prefill(engine: OracleEngine, request_id: str = "a", num_steps: int = 12) -> None:
    engine.add(request_id, PROMPT, max_tokens=1, do_remote_decode=True)
    for _ in range(num_steps):
        engine.step()


@pytest.mark.parametrize("policy", ["all", "after-n-hits"])
def test_the_answer_comes_when_the_kv_is_there_whatever_the_store_policy(policy: str) -> None:
    store = LateStore()
    producer = engine_over(store, "kv_producer", policy)
    prefill(producer)
    assert "a" not in producer.outputs
    assert producer.core.awaits_threads
    store.say()
    producer.step()
    assert producer.last("a").num_stored_tokens == 4 * BLOCK_SIZE
    assert producer.tokens("a") == lone_answer(PROMPT, b"", 1)
    consumer = engine_over(store.restarted(), "kv_consumer")
    consumer.add("b", PROMPT, max_tokens=4)
    consumer.run()
    assert consumer.num_cached("b") == 4 * BLOCK_SIZE
    assert consumer.tokens("b") == lone_answer(PROMPT, b"", 4)


def test_what_was_found_on_the_device_is_handed_over_too() -> None:
    store = OracleTierStore()
    engine = engine_over(store, "kv_both", "after-n-hits")
    engine.add("first", PROMPT, max_tokens=1)
    engine.run()
    assert store.num_blocks == 0
    engine.add("a", PROMPT, max_tokens=1, do_remote_decode=True)
    engine.run()
    assert engine.num_cached("a") == 4 * BLOCK_SIZE
    assert engine.last("a").num_stored_tokens == 4 * BLOCK_SIZE


def test_the_answer_comes_at_its_deadline_and_says_how_much_is_there() -> None:
    engine = engine_over(LateStore())
    prefill(engine, num_steps=90)
    assert "a" not in engine.outputs
    engine.run()
    assert engine.last("a").num_stored_tokens == 0
    assert engine.last("a").finish_reason == "length"
    assert not engine.core.awaits_threads


def test_nothing_is_awaited_for_a_request_that_was_aborted() -> None:
    store = LateStore()
    engine = engine_over(store)
    engine.add("a", PROMPT, max_tokens=50, do_remote_decode=True)
    engine.step()
    engine.handle(AbortRequests(("a",)))
    engine.run()
    assert "a" not in engine.outputs
    store.say()
    engine.run()
    assert not engine.core.awaits_threads


def test_a_producer_fetches_nothing_and_a_consumer_stores_nothing() -> None:
    store = OracleTierStore()
    for role, num_blocks in (("kv_consumer", 0), ("kv_producer", 4)):
        engine = engine_over(store, role)
        engine.add("a", PROMPT, max_tokens=1)
        engine.run()
        assert store.num_blocks == num_blocks
        store = store.restarted()
    again = engine_over(store, "kv_producer")
    again.add("a", PROMPT, max_tokens=1)
    again.run()
    assert (store.fetched, again.num_cached("a")) == ([], 0)


def test_without_tiers_nothing_is_waited_for() -> None:
    waiting = AnswersInHandover(KVConnector[Request](), 5000, BLOCK_SIZE)
    assert (list(waiting.take_ended()), waiting.next_due) == ([], None)
    waiting.add(EngineOutput("a", finish_reason="length"))
    (output,) = waiting.take_ended()
    assert (output.request_id, output.num_stored_tokens) == ("a", 0)


def test_an_answer_that_its_grammar_ends_waits_too_and_leaves_no_handover() -> None:
    store = LateStore()
    engine = engine_over(store)
    params = SamplingParams(max_tokens=9, seed=1, structured_outputs=toy_constraint(1, 3))
    engine.add("a", PROMPT, params=params, do_remote_decode=True)
    for _ in range(30):
        engine.step()
    assert engine.outputs["a"][-1].finish_reason is None
    store.say()
    engine.run()
    assert (engine.last("a").finish_reason, engine.last("a").num_stored_tokens) == (
        "stop",
        4 * BLOCK_SIZE,
    )
