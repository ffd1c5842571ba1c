"""Pressure without a model: crowds of equal prompts, tight pools, writers that do not finish."""

from __future__ import annotations

import hashlib

import pytest

from lora_serve.fuzz.oracle.engine import BLOCK_SIZE, OracleEngine
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.messages import AbortRequests

NUM_SHARED_BLOCKS = 20
LONG = [10 + i % 400 for i in range(NUM_SHARED_BLOCKS * BLOCK_SIZE + 5)]


def add_crowd(engine: OracleEngine, count: int, **settings: object) -> None:
    for number in range(count):
        engine.add(f"r{number}", LONG, **settings)


@pytest.mark.parametrize("lora_name", [BASE_MODEL, "a"])
def test_64_equal_prompts_at_once_cost_one_prefill(lora_name: str | NoAdapter) -> None:
    engine = OracleEngine(num_blocks=400, max_num_seqs=64, max_num_batched_tokens=512)
    engine.load("a", "/a", "content")
    engine.step()
    add_crowd(engine, 64, lora_name=lora_name, max_tokens=1)
    engine.run()
    num_tail = len(LONG) - NUM_SHARED_BLOCKS * BLOCK_SIZE
    assert engine.executor.num_computed_tokens == len(LONG) + 63 * num_tail
    digest = b"" if lora_name is BASE_MODEL else hashlib.sha256(b"content").digest()
    assert all(engine.tokens(f"r{n}") == lone_answer(LONG, digest, 1) for n in range(64))


@pytest.mark.parametrize("lora_name", [BASE_MODEL, "a"])
def test_thousands_of_equal_prompts_pass_through_a_pool_of_the_prefix_and_a_few_tails(
    lora_name: str | NoAdapter,
) -> None:
    num_tails = 4
    engine = OracleEngine(
        num_blocks=NUM_SHARED_BLOCKS + num_tails, max_num_seqs=64, max_num_batched_tokens=512
    )
    engine.load("a", "/a", "content")
    engine.step()
    add_crowd(engine, 2000, lora_name=lora_name, max_tokens=2)
    most_running = 0
    while engine.core.has_requests:
        assert engine.core.step(), "no request runs, and one waits"
        most_running = max(most_running, len(engine.executor.steps[-1].requests))
    engine.core.check_invariants()
    engine._sort_replies()
    assert most_running == num_tails
    assert engine.core.scheduler.totals.num_preemptions == 0
    hits = [engine.num_cached(f"r{n}") for n in range(2000)]
    assert sum(hit == 0 for hit in hits) == 1
    assert set(hits) == {0, NUM_SHARED_BLOCKS * BLOCK_SIZE}


def test_when_the_writer_leaves_in_mid_prefill_one_of_the_others_goes_on_from_there() -> None:
    engine = OracleEngine(num_blocks=100, max_num_seqs=8, max_num_batched_tokens=64)
    add_crowd(engine, 8, max_tokens=3)
    for _ in range(2):
        engine.step()
    (written,) = {step.requests[0].end for step in engine.executor.steps[-1:]}
    assert 0 < written < len(LONG)
    engine.core.handle(AbortRequests(("r0",)))
    engine.run()
    computed = [r for step in engine.executor.steps for r in step.requests if r.start < written]
    assert {r.request_id for r in computed} == {"r0"}, "what was committed is not computed again"
    for number in range(1, 8):
        assert engine.tokens(f"r{number}") == lone_answer(LONG, b"", 3)


def test_every_writer_that_leaves_is_followed_by_another() -> None:
    engine = OracleEngine(num_blocks=100, max_num_seqs=8, max_num_batched_tokens=40)
    add_crowd(engine, 8, max_tokens=3)
    for number in range(7):
        engine.step()
        engine.core.handle(AbortRequests((f"r{number}",)))
    engine.run()
    assert engine.tokens("r7") == lone_answer(LONG, b"", 3)
    assert engine.kv.usage == 0.0


def test_a_writer_that_is_preempted_lets_the_others_be_right() -> None:
    """An older request outgrows the pool while a crowd waits for what a younger one writes."""
    engine = OracleEngine(num_blocks=23, max_num_seqs=6, max_num_batched_tokens=48)
    old = next(p for n in range(99) if len(lone_answer(p := [n + 9] * 30, b"", 60)) == 60)
    engine.add("old", old, max_tokens=60)
    engine.step()
    add_crowd(engine, 4, max_tokens=3)
    engine.run()
    assert engine.core.scheduler.totals.num_preemptions > 0
    assert engine.tokens("old") == lone_answer(old, b"", 60)
    for number in range(4):
        assert engine.tokens(f"r{number}") == lone_answer(LONG, b"", 3)


def test_a_writer_whose_adapter_is_lost_takes_only_its_own_with_it() -> None:
    engine = OracleEngine(num_blocks=100, max_loras=1, max_cpu_loras=1)
    for name in "ab":
        engine.load(name, f"/{name}", name)
        engine.step()
    del engine.loader.files["/a"]  # evicted by b, and not to be had any more
    for number in range(3):
        engine.add(f"a{number}", LONG, lora_name="a")
        engine.add(f"b{number}", LONG, lora_name="b")
    engine.run()
    for number in range(3):
        error = engine.last(f"a{number}").error
        assert error is not None
        assert error.kind == "AdapterChangedError"
        assert engine.tokens(f"b{number}") == lone_answer(LONG, hashlib.sha256(b"b").digest(), 4)
