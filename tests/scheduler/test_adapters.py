"""LoRA slots, versions and leases, through the engine core and over the oracle."""

from __future__ import annotations

import hashlib

import pytest

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.messages import AbortRequests, Pause, ResetPrefixCache, UnloadAdapter
from lora_serve.scheduler.queue import OVERTAKE_LIMIT
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler

LONG = [10 + i % 400 for i in range(100)]


def digest(content: str) -> bytes:
    return hashlib.sha256(content.encode()).digest()


def answer(content: str, max_tokens: int = 4) -> list[int]:
    return lone_answer(LONG, digest(content), max_tokens)


def ask(engine: OracleEngine, request_id: str, name: str) -> int:
    """Run one request; the number of tokens it hit."""
    engine.add(request_id, LONG, lora_name=name)
    engine.run()
    return engine.num_cached(request_id)


def test_new_bytes_under_an_old_name_never_hit_and_old_bytes_hit_again() -> None:
    engine = OracleEngine()
    engine.load("a", "/a", "one")
    engine.step()
    assert (ask(engine, "cold", "a"), ask(engine, "warm", "a")) == (0, 96)
    engine.load("a", "/a", "two", inplace=True)  # the same path
    engine.step()
    assert ask(engine, "replaced", "a") == 0
    assert engine.tokens("replaced") == answer("two")
    engine.load("a", "/a", "one", inplace=True)
    engine.step()
    assert ask(engine, "rolled back", "a") == 96
    assert engine.tokens("rolled back") == answer("one")


def test_equal_bytes_at_another_path_keep_their_cache() -> None:
    engine = OracleEngine()
    engine.load("a", "/a", "one")
    engine.step()
    ask(engine, "cold", "a")
    engine.load("a", "/elsewhere", "one", inplace=True)
    engine.step()
    assert ask(engine, "warm", "a") == 96


def test_a_running_request_keeps_its_version_across_load_inplace() -> None:
    engine = OracleEngine()
    engine.load("a", "/a", "one")
    engine.step()
    engine.add("old", LONG, lora_name="a", max_tokens=20)
    for _ in range(4):
        engine.step()
    engine.load("a", "/a", "two", inplace=True)
    engine.step()
    engine.add("new", LONG, lora_name="a", max_tokens=20)
    engine.run()
    assert engine.tokens("old") == answer("one", 20)
    assert engine.tokens("new") == answer("two", 20)


def test_an_unloaded_name_is_gone_at_once_while_its_requests_finish() -> None:
    engine = OracleEngine()
    engine.load("a", "/a", "one")
    engine.step()
    engine.add("old", LONG, lora_name="a", max_tokens=20)
    engine.step()
    engine.core.handle(UnloadAdapter(9, "a"))
    engine.add("late", LONG, lora_name="a")
    engine.run()
    assert engine.tokens("old") == answer("one", 20)
    error = engine.last("late").error
    assert error is not None
    assert error.kind == "AdapterNotFoundError"


def test_invalidation_makes_an_adapter_cold_and_leaves_the_others() -> None:
    engine = OracleEngine()
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
        engine.step()
        ask(engine, f"warm {name}", name)
    engine.core.handle(ResetPrefixCache(9, "a"))
    assert (ask(engine, "a again", "a"), ask(engine, "b again", "b")) == (0, 96)


def test_a_step_holds_at_most_max_loras_adapters() -> None:
    engine = OracleEngine(max_loras=2, max_num_seqs=8, num_blocks=200)
    for name in "abcde":
        engine.load(name, f"/{name}", name)
    engine.run()
    for index in range(20):
        engine.add(f"r{index}", LONG, lora_name="abcde"[index % 5], max_tokens=6)
    engine.run()
    for step in engine.executor.steps:
        assert len({request.adapter for request in step.requests}) <= 2
    for index in range(20):
        assert engine.tokens(f"r{index}") == answer("abcde"[index % 5], 6)


def test_a_hot_adapter_overtakes_a_cold_one_only_so_often() -> None:
    engine = OracleEngine(max_loras=1, max_num_seqs=2, num_blocks=200)
    for name in ("hot", "cold"):
        engine.load(name, f"/{name}", name)
    engine.step()
    engine.add("hot 0", LONG, lora_name="hot", max_tokens=30)
    engine.step()
    engine.add("cold", LONG, lora_name="cold", max_tokens=1)
    for index in range(1, 10 * OVERTAKE_LIMIT):  # a stream that never leaves the LoRA slot free
        engine.add(f"hot {index}", LONG, lora_name="hot", max_tokens=3)
        engine.step()
    engine.run()
    order = list(engine.outputs)
    num_before = order.index("cold")
    assert OVERTAKE_LIMIT <= num_before <= OVERTAKE_LIMIT + 3


def test_base_requests_pass_while_an_adapter_waits_for_a_slot() -> None:
    engine = OracleEngine(max_loras=1, max_num_seqs=4)
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
    engine.step()
    engine.add("a", LONG, lora_name="a", max_tokens=30)
    engine.step()
    engine.add("b", LONG, lora_name="b")
    engine.add("base", LONG)
    engine.step()
    engine.step()
    engine.step()
    assert "base" in engine.outputs
    assert "b" not in engine.outputs


def test_an_evicted_adapter_comes_back_and_its_kv_is_still_hit() -> None:
    engine = OracleEngine(max_loras=1, max_cpu_loras=1, load_delay=2)
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
        for _ in range(5):
            engine.step()
    ask(engine, "a cold", "a")
    ask(engine, "b cold", "b")
    assert engine.core.adapters.num_evictions >= 1
    assert ask(engine, "a warm", "a") == 96
    assert engine.tokens("a warm") == answer("a")


def test_an_evicted_adapter_whose_files_changed_is_refused() -> None:
    engine = OracleEngine(max_loras=1, max_cpu_loras=1)
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
        engine.step()
    ask(engine, "b", "b")
    engine.loader.files["/a"] = "something else"
    engine.add("a", LONG, lora_name="a")
    engine.add("b again", LONG, lora_name="b")
    engine.run()
    error = engine.last("a").error
    assert error is not None
    assert error.kind == "AdapterChangedError"
    assert "'a' have changed" in error.message
    assert engine.tokens("b again") == answer("b")


def test_the_slot_of_aborted_requests_is_given_to_others() -> None:
    engine = OracleEngine(max_loras=1, max_cpu_loras=1, load_delay=3)
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
        for _ in range(6):
            engine.step()
    engine.add("a", LONG, lora_name="a")
    engine.step()
    engine.core.handle(AbortRequests(("a",)))
    engine.add("b", LONG, lora_name="b")
    engine.run()
    assert engine.tokens("b") == answer("b")


def test_a_reload_that_fails_when_no_request_waits_any_more_does_no_harm() -> None:
    engine = OracleEngine(max_loras=1, max_cpu_loras=1, load_delay=3)
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
        for _ in range(6):
            engine.step()
    engine.loader.files["/a"] = "something else"
    engine.add("a", LONG, lora_name="a")
    engine.step()
    engine.core.handle(AbortRequests(("a",)))
    engine.run()
    assert ask(engine, "b", "b") == 0
    assert engine.tokens("b") == answer("b")


class KeepsTheSlot(Scheduler):
    """A request that a pause holds leaves its adapter's LoRA slot taken until the next step."""

    def _hold(self, request: Request) -> None:
        self._queue.pop(request)
        self._pause.hold(request)


@pytest.mark.parametrize(("scheduler_class", "goes_on"), [(Scheduler, True), (KeepsTheSlot, False)])
def test_a_request_that_a_pause_holds_gives_its_slot_to_one_that_has_to_end(
    scheduler_class: type[Scheduler], goes_on: bool
) -> None:
    """After a step without requests an engine waits: then the pause never comes to rest."""
    engine = OracleEngine(num_blocks=10, max_loras=1, policy="priority")
    engine.core.scheduler.__class__ = scheduler_class
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
    engine.step()
    engine.add("base", [8, *LONG[:59]], max_tokens=40)
    engine.add("begun", [9, *LONG[:49]], lora_name="b", max_tokens=60, priority=1)
    for _ in range(2):
        engine.step()
    engine.add("next", [7, *LONG, *LONG[:19]], lora_name="a")
    while engine.last("base").finish_reason is None:
        engine.step()
    assert engine.core.scheduler.totals.num_preemptions == 1, "`begun` has made room for `base`"
    engine.handle(Pause(9, "wait"))
    while engine.step():
        pass
    assert (9 in engine.calls) == goes_on
    assert (len(engine.tokens("begun")) == 60) == goes_on
