from __future__ import annotations

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.messages import (
    EngineReply,
    GetRequests,
    GetStats,
    ListAdapters,
    LoadAdapter,
    RequestStanding,
    ResetPrefixCache,
    StepOutputs,
    UnloadAdapter,
)

LONG = [10 + i % 400 for i in range(100)]


def test_stats_tell_who_runs_who_waits_and_what_was_hit() -> None:
    engine = OracleEngine(max_loras=1, max_num_seqs=2)
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
        engine.step()
    for name in ("a", "a", "b"):
        engine.add(f"{name}{len(engine.outputs)}", LONG, lora_name=name, max_tokens=8)
        engine.step()
    engine.core.handle(GetStats(77))
    engine.step()
    stats = engine.calls[77].stats
    assert stats is not None
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.running_adapters, stats.waiting_adapters) == (("a",), ("b",))
    assert (stats.adapter_loads, stats.num_blocks) == (2, 64)
    assert stats.prefix_cache_queries == 100
    assert 0 < stats.kv_cache_usage < 1
    engine.run()
    assert engine.core.stats().kv_cache_usage == 0


def test_a_request_is_scheduled_when_it_is_first_admitted_and_never_again() -> None:
    """Not when it comes, and not when it goes on after a preemption."""
    engine = OracleEngine(num_blocks=12, max_num_seqs=2, enable_prefix_caching=False)
    begin = engine.clock.now
    for name in ("first", "second", "third"):
        engine.add(name, LONG[:70], max_tokens=60)
    engine.run()
    assert engine.core.scheduler.totals.num_preemptions > 0
    ages = [engine.last(name).scheduled_time - begin for name in ("first", "second", "third")]
    seconds = engine.clock.now - begin
    assert 0 < ages[0] <= ages[1] < 0.2 * seconds
    assert ages[1] < ages[2] < seconds


def test_it_tells_how_far_the_requests_that_it_has_have_come() -> None:
    engine = OracleEngine(max_num_seqs=1, enable_lora=False)
    for name in ("first", "second"):
        engine.add(name, LONG, max_tokens=8)
    engine.step()
    engine.handle(GetRequests(5, ("second", "unknown", "first")))
    waits, runs = engine.calls[5].requests
    assert waits == RequestStanding("second", False, 0, 0, 0)
    assert runs == RequestStanding("first", True, 64, 0, 0)  # as much as a step may compute
    engine.step()
    engine.handle(GetRequests(6, ("first",)))
    assert engine.calls[6].requests == (RequestStanding("first", True, len(LONG), 0, 1),)
    engine.run()
    engine.add("third", LONG, max_tokens=8)
    engine.step()
    engine.handle(GetRequests(7, ("first", "third")))
    (again,) = engine.calls[7].requests  # of one that has ended nothing is told
    assert again.num_cached_tokens > 0
    assert again.num_computed_tokens == len(LONG)


def test_steps_count_each_prompt_token_and_each_generated_one_the_last_too() -> None:
    engine = OracleEngine(enable_lora=False)
    told: list[StepOutputs] = []
    take = engine.core.take_replies

    def noting() -> list[EngineReply]:
        replies = take()
        told.extend(reply for reply in replies if isinstance(reply, StepOutputs))
        return replies

    engine.core.take_replies = noting  # type: ignore[method-assign]
    engine.add("a", LONG, max_tokens=5)
    engine.run()
    assert len(engine.tokens("a")) == 5
    assert sum(outputs.step_num_tokens for outputs in told) == len(LONG) + 5


def test_calls_about_unknown_adapters_are_answered_with_errors() -> None:
    engine = OracleEngine()
    engine.core.handle(UnloadAdapter(91, "nobody"))
    engine.core.handle(ResetPrefixCache(92, "nobody"))
    engine.load("a", "/nowhere")
    engine.run()
    kinds = [reply.error.kind for reply in engine.calls.values() if reply.error]
    assert kinds == ["AdapterNotFoundError"] * 3


def test_a_name_is_refused_at_once_and_again_when_two_loads_race() -> None:
    engine = OracleEngine(load_delay=2)
    engine.load("a", "/a", "one")
    engine.load("a", "/a", "one")  # neither is published yet
    engine.run()
    first, second = engine.calls.values()
    assert first.error is None
    assert second.error is not None
    assert second.error.kind == "AdapterExistsError"
    engine.load("a", "/a", "one")
    third = engine.calls[3].error
    assert third is not None
    assert third.kind == "AdapterExistsError"
    assert "load_inplace" in third.message


def test_an_evicted_adapter_is_read_once_for_all_requests_that_wait_for_it() -> None:
    engine = OracleEngine(max_loras=1, max_cpu_loras=1, load_delay=3)
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
        engine.run()
    for number in range(3):
        engine.add(f"r{number}", LONG, lora_name="a")
        engine.step()
    assert engine.loader.num_pending == 1
    engine.run()
    assert engine.core.stats().adapter_loads == 3
    assert all(engine.last(f"r{number}").finish_reason == "length" for number in range(3))


def test_adapters_are_listed_with_all_that_identifies_them() -> None:
    engine = OracleEngine()
    engine.load("a", "/a", "one")
    engine.step()
    engine.core.handle(ListAdapters(5))
    engine.step()
    (info,) = engine.calls[5].adapters
    assert (info.name, info.path, info.generation, info.residency) == ("a", "/a", 0, "resident")
    assert len(info.digest) == 64


def test_without_enable_lora_adapters_are_refused_and_names_unknown() -> None:
    engine = OracleEngine(enable_lora=False)
    engine.core.handle(LoadAdapter(1, "a", "/a"))
    engine.add("r", LONG, lora_name="a")
    refused, unknown = engine.calls[1].error, engine.last("r").error
    assert refused is not None
    assert "--enable-lora" in refused.message
    assert unknown is not None
    assert unknown.kind == "AdapterNotFoundError"


def test_an_evicted_adapter_whose_files_are_gone_is_not_called_unknown() -> None:
    engine = OracleEngine(max_loras=1, max_cpu_loras=1)
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
        engine.step()
    del engine.loader.files["/a"]
    engine.add("r", LONG, lora_name="a")
    engine.run()
    error = engine.last("r").error
    assert error is not None
    assert error.kind == "AdapterChangedError"
    assert "'a' are gone" in error.message
    engine.loader.files["/a"] = "a"
    engine.add("again", LONG, lora_name="a")
    engine.run()
    assert engine.last("again").finish_reason == "length"
