"""Requests that wait for KV from the tiers: who waits, what is loaded, what ends the waiting."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from msgspec import structs

from lora_serve.config import KVTierConfig
from lora_serve.fuzz.oracle.content import UNWRITTEN
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.executor import OracleExecutor
from lora_serve.fuzz.oracle.lone_answers import lone_answer, lone_pooled, lone_prompt_logprobs
from lora_serve.fuzz.oracle.tier_store import Faults, OracleTierStore
from lora_serve.identity import BASE_MODEL, Everything
from lora_serve.kv.fetches import Fetches
from lora_serve.kv.saves import PendingSaves
from lora_serve.kv.tiered_connector import TieredConnector
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.messages import AbortRequests, LoadAdapter, ResetPrefixCache, UnloadAdapter
from lora_serve.pooling import PoolingParams
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.request import Request
from lora_serve.step import ModelRunnerOutput, SchedulerOutput

LONG = [10 + i % 400 for i in range(200)]  # twelve full blocks, and half a one
SHARED = 192
ANSWER = lone_answer(LONG, b"", 4)
OTHER_TAIL = [*LONG[:96], *(500 - i for i in range(100))]
SILENT = Faults(silent=1.0)


def stored(*prompts: list[int], faults: Faults | None = None) -> OracleTierStore:
    """A store that has the KV of these prompts, computed by an engine that is gone."""
    store = OracleTierStore()
    engine = OracleEngine(store=store)
    for index, prompt in enumerate(prompts or (LONG,)):
        engine.add(f"r{index}", prompt)
        engine.run()
    store = store.restarted()
    store.faults = faults or Faults()
    return store


def poisoned(store: OracleTierStore) -> OracleTierStore:
    """Every block holds what would change any answer that it entered."""
    for blocks in store.blocks.values():
        for block_hash, data in blocks.items():
            blocks[block_hash] = UNWRITTEN * (len(data) // len(UNWRITTEN))
    return store


def test_what_an_engine_before_computed_is_loaded_and_not_computed_again() -> None:
    store = stored()
    engine = OracleEngine(store=store)
    engine.add("a", LONG)
    engine.run()
    assert engine.tokens("a") == ANSWER
    assert engine.num_cached("a") == SHARED
    assert engine.last("a").num_cached_by_tier == {"device": 0, "ram": 96, "disk": 96}
    assert engine.executor.num_computed_tokens == 200 - SHARED + 3
    totals = engine.core.scheduler.totals
    assert (totals.external_cache_queries, totals.external_cache_hits) == (200, SHARED)
    assert (totals.prefix_cache_queries, totals.prefix_cache_hits) == (200, 0)


def test_loaded_blocks_are_hit_on_the_device_by_the_next_and_not_stored_again() -> None:
    store = stored()
    engine = OracleEngine(store=store)
    for name in ("a", "b"):
        engine.add(name, LONG)
        engine.run()
    assert engine.last("b").num_cached_by_tier == {"device": SHARED, "ram": 0, "disk": 0}
    assert len(store.fetched) == 1
    assert not any(step.kv_saves for step in engine.executor.steps)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_equal_prompts_share_one_fetch(enable_prefix_caching: bool) -> None:
    store = stored(faults=Faults(delay=5))
    engine = OracleEngine(store=store, enable_prefix_caching=enable_prefix_caching, num_blocks=200)
    for index in range(8):
        engine.add(f"r{index}", LONG)
    engine.step()
    assert engine.core.scheduler.num_fetching == 8
    engine.run()
    assert len(store.fetched) == 1
    assert all(engine.tokens(f"r{i}") == ANSWER for i in range(8))
    assert all(engine.num_cached(f"r{i}") == SHARED for i in range(8))


def test_a_prompt_that_shares_the_beginning_only_fetches_its_own_end() -> None:
    store = stored(LONG, OTHER_TAIL, faults=Faults(delay=3))
    engine = OracleEngine(store=store, num_blocks=200)
    for name, prompt in (("a", LONG), ("b", OTHER_TAIL)):
        engine.add(name, prompt)
    engine.run()
    assert engine.tokens("b") == lone_answer(OTHER_TAIL, b"", 4)
    assert engine.num_cached("b") == SHARED
    assert [len(hashes) for hashes in store.fetched] == [12, 6]


def engine_where_a_longer_fetch_is_in_flight() -> OracleEngine:
    store = stored(faults=Faults(delay=3))
    engine = OracleEngine(store=store, num_blocks=200, policy="priority")
    engine.add("long", LONG, priority=5)
    engine.step()
    return engine


def test_prompt_logprobs_take_no_more_of_a_joined_fetch_than_they_may_find() -> None:
    engine = engine_where_a_longer_fetch_is_in_flight()
    params = SamplingParams(max_tokens=4, seed=1, prompt_logprobs=0, prompt_logprob_start=40)
    engine.add("scored", LONG, params=params, priority=1)
    engine.step()
    assert engine.core.scheduler.num_fetching == 2
    engine.run()
    scored = [one for output in engine.outputs["scored"] for one in output.prompt_logprobs]
    assert scored == lone_prompt_logprobs(LONG, b"", 40)
    assert engine.num_cached("scored") == 32


def test_the_last_token_of_whole_blocks_is_computed_even_if_a_joined_fetch_has_it() -> None:
    engine = engine_where_a_longer_fetch_is_in_flight()
    nothing, whole_blocks = SamplingParams(max_tokens=0, seed=1), LONG[:96]
    engine.add("last", whole_blocks, params=nothing, pooling=PoolingParams(), priority=1)
    engine.step()
    assert engine.core.scheduler.num_fetching == 2
    engine.run()
    assert engine.pooled("last") == lone_pooled(whole_blocks, b"", PoolingParams())
    assert engine.num_cached("last") == 80


def test_others_run_while_one_waits_for_its_fetch() -> None:
    store = stored(faults=Faults(delay=10))
    engine = OracleEngine(store=store, max_num_seqs=1, num_blocks=14)
    engine.add("waits", LONG)
    engine.step()
    assert engine.core.scheduler.num_fetching == 1
    assert engine.kv.usage == 0.0  # it holds no block and no LoRA slot
    engine.add("runs", [5, 6, 8])
    while "runs" not in engine.outputs or not engine.last("runs").finish_reason:
        engine.step()
    assert engine.core.scheduler.num_fetching == 1
    engine.run()
    assert engine.tokens("waits") == ANSWER


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_preempted_request_may_find_its_blocks_in_the_tiers(enable_prefix_caching: bool) -> None:
    store = OracleTierStore()
    engine = OracleEngine(
        store=store, num_blocks=8, max_num_seqs=4, enable_prefix_caching=enable_prefix_caching
    )
    prompts = {name: [n, *range(10, 40)] for n, name in enumerate(("a", "b", "c"))}
    for name, prompt in prompts.items():
        engine.add(name, prompt, params=SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
    engine.run()
    assert engine.core.scheduler.totals.num_preemptions > 0
    assert store.fetched
    for name, prompt in prompts.items():
        answer = engine.tokens(name)
        assert answer[: len(lone_answer(prompt, b"", 50))] == lone_answer(prompt, b"", 50)


def test_prompt_logprobs_are_computed_even_if_the_tiers_have_the_prompt() -> None:
    store = stored()
    engine = OracleEngine(store=store)
    engine.add("a", LONG, params=SamplingParams(max_tokens=4, seed=1, prompt_logprobs=1))
    engine.run()
    assert (store.fetched, engine.num_cached("a")) == ([], 0)


def test_no_more_is_fetched_than_there_is_memory_for() -> None:
    block_bytes = 16 * 32
    store = stored(faults=Faults(delay=2))
    engine = OracleEngine(store=store, max_fetched_bytes=5 * block_bytes)
    for index in range(3):
        engine.add(f"r{index}", [*LONG, index])
    engine.run()
    assert max(map(len, store.fetched)) == 5
    assert all(engine.tokens(f"r{i}") == lone_answer([*LONG, i], b"", 4) for i in range(3))


# ── what ends the waiting ───────────────────────────────────────────────────────────────────


def test_a_store_that_never_answers_is_given_up() -> None:
    engine = OracleEngine(store=(store := stored(faults=SILENT)))
    engine.add("a", LONG)
    engine.run()
    assert engine.tokens("a") == ANSWER
    assert (engine.num_cached("a"), store.num_cancelled) == (0, 1)


def test_a_result_that_comes_after_that_is_dropped() -> None:
    engine = OracleEngine(store=(store := stored(faults=Faults(delay=10**6))))
    engine.add("a", LONG)
    engine.step()
    (late,) = store.pending.values()
    engine.run()
    store.pending[1] = replace(late, wait=0)
    engine.add("b", [1, 2, 3])
    engine.run()
    assert engine.core.scheduler.num_fetching == 0
    assert engine.tokens("b") == lone_answer([1, 2, 3], b"", 4)


@pytest.mark.parametrize("faults", [SILENT, Faults(fails=1.0)])
def test_with_the_policy_fail_a_failed_load_ends_the_request(faults: Faults) -> None:
    engine = OracleEngine(
        store=stored(faults=faults), kv_tiers=KVTierConfig(kv_load_failure_policy="fail")
    )
    engine.add("a", LONG)
    engine.run()
    error = engine.last("a").error
    assert error is not None
    assert error.kind == "KVLoadError"
    assert "--kv-load-failure-policy recompute" in error.message


def test_an_absent_block_is_no_failure() -> None:
    store = stored()
    for blocks in store.blocks.values():
        del blocks[list(blocks)[6]]
    engine = OracleEngine(store=store, kv_tiers=KVTierConfig(kv_load_failure_policy="fail"))
    engine.add("a", LONG)
    engine.run()
    assert (engine.tokens("a"), engine.num_cached("a")) == (ANSWER, 96)


def test_an_abort_cancels_the_fetch_unless_another_waits_for_it() -> None:
    engine = OracleEngine(store=(store := stored(faults=Faults(delay=5))))
    for name in ("a", "b"):
        engine.add(name, LONG)
    engine.step()
    engine.core.handle(AbortRequests(("a",)))
    assert store.num_cancelled == 0
    engine.core.handle(AbortRequests(("b",)))
    assert (store.num_cancelled, engine.core.has_requests) == (1, False)
    engine.run()


def test_an_adapter_that_is_unloaded_meanwhile_still_answers() -> None:
    store = OracleTierStore()
    digest = b""
    for faults in (Faults(), Faults(delay=5)):
        store = store.restarted()
        engine = OracleEngine(store=store)
        engine.load("a", "/a", "one")
        engine.run()
        store.faults = faults
        engine.add("r", LONG, lora_name="a")
        engine.step()
        engine.core.handle(UnloadAdapter(9, "a"))
        engine.run()
        adapter = engine.last("r").adapter
        assert adapter is not BASE_MODEL
        digest = adapter.digest
    assert engine.num_cached("r") == SHARED
    assert engine.tokens("r") == lone_answer(LONG, digest, 4)


def test_an_adapter_that_is_lost_meanwhile_ends_its_request() -> None:
    store = OracleTierStore()
    for _ in range(2):
        store = store.restarted()
        store.faults = Faults(delay=5)
        engine = OracleEngine(store=store, max_loras=1, max_cpu_loras=1)
        engine.load("a", "/a", "a")
        engine.run()
        engine.add("r", LONG, lora_name="a")
        engine.step()
        if engine.core.scheduler.num_fetching:
            engine.loader.files = {"/b": "b"}
            engine.core.handle(LoadAdapter(99, "b", "/b", pinned=True))  # evicts a, which none runs
        engine.run()
    error = engine.last("r").error
    assert error is not None
    assert error.kind == "AdapterChangedError"


# ── what the device cache lost or gained meanwhile ──────────────────────────────────────────


def fill(engine: OracleEngine, prompt: list[int], name: str) -> None:
    engine.add(name, prompt, max_tokens=1)
    while name not in engine.outputs or not engine.last(name).finish_reason:
        engine.step()


def engine_that_has(num_tokens: int, store: OracleTierStore, **settings: object) -> OracleEngine:
    """Its device cache has the first num_tokens of LONG; fetches take five steps."""
    engine = OracleEngine(store=store, num_blocks=16, **settings)  # type: ignore[arg-type]
    store.faults = SILENT
    fill(engine, LONG[: num_tokens + 1], "first")
    store.faults = Faults(delay=5)
    return engine


def play_gap(engine: OracleEngine) -> list[int]:
    """The hit's own blocks are evicted while what follows them is fetched."""
    engine.add("a", LONG)
    engine.step()
    assert engine.core.scheduler.num_fetching == 1
    engine.add("evicts", [3] * 240, max_tokens=1)
    engine.run()
    return engine.tokens("a")


class LoadsOverTheGap(TieredConnector[Request]):
    """Loads what was fetched, wherever the device cache's hit ends by now."""

    def admitted(self, request: Request, num_hit_blocks: int) -> dict[str, int]:
        fetch = self._fetches.in_hand(request)
        if fetch is not None:
            fetch.first_block = num_hit_blocks
            fetch.hashes = tuple(request.block_hashes[num_hit_blocks:])
        return super().admitted(request, num_hit_blocks)

    def fetch(self, request: Request, first_block: int, last_block: int) -> bool:
        return self._fetches.in_hand(request) is None and super().fetch(
            request, first_block, last_block
        )


def test_a_gap_before_what_was_fetched_is_fetched_too() -> None:
    engine = engine_that_has(64, stored())
    assert play_gap(engine) == ANSWER
    assert engine.num_cached("a") == SHARED


def test_loading_over_a_gap_would_be_wrong() -> None:
    engine = engine_that_has(64, stored(), connector_class=LoadsOverTheGap)
    assert play_gap(engine) != ANSWER


def test_blocks_that_came_to_the_device_meanwhile_are_used() -> None:
    store = stored(faults=Faults(delay=8))
    engine = OracleEngine(store=store, num_blocks=40)
    engine.add("a", LONG)
    engine.step()
    engine.add("b", LONG[:100], params=SamplingParams(max_tokens=1, seed=1, prompt_logprobs=1))
    engine.run()  # b computes what a waits for
    assert engine.tokens("a") == ANSWER
    assert engine.last("a").num_cached_by_tier["device"] == 96
    assert engine.num_cached("a") == SHARED


class IgnoresWhoseChainItIs(TieredConnector[Request]):
    """Gives every request that waited for a fetch all of its blocks."""

    def admitted(self, request: Request, num_hit_blocks: int) -> dict[str, int]:
        fetch = self._fetches.in_hand(request)
        if fetch is not None:
            fetch.hashes = tuple(request.block_hashes[fetch.first_block :])
        return super().admitted(request, num_hit_blocks)


@pytest.mark.parametrize("connector", [TieredConnector, IgnoresWhoseChainItIs])
def test_whoever_joined_a_fetch_gets_the_blocks_of_its_own_chain_only(
    connector: type[TieredConnector[Request]],
) -> None:
    engine = OracleEngine(
        store=stored(faults=Faults(delay=3)),
        num_blocks=60,
        policy="priority",
        connector_class=connector,
    )
    engine.add("a", LONG, priority=5)
    engine.step()
    engine.add("b", OTHER_TAIL, priority=1)
    engine.step()
    assert engine.core.scheduler.num_fetching == 2
    engine.run()
    is_right = engine.tokens("b") == lone_answer(OTHER_TAIL, b"", 4)
    assert is_right == (connector is TieredConnector)


# ── saving ──────────────────────────────────────────────────────────────────────────────────


class GathersAfterCompute(OracleExecutor):
    """Saves what a block holds once others have written into it."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(structs.replace(step, kv_saves=()))
        return structs.replace(output, kv_saves=tuple(map(self.gather, step.kv_saves)))


@pytest.mark.parametrize("executor", [OracleExecutor, GathersAfterCompute])
def test_a_block_is_saved_as_it_was_committed_even_if_it_is_reused_at_once(
    executor: type[OracleExecutor],
) -> None:
    store = OracleTierStore()
    engine = OracleEngine(
        store=store,
        enable_prefix_caching=False,
        num_blocks=13,
        max_num_batched_tokens=256,
        executor_class=executor,
    )
    for name, prompt in (("a", LONG), ("b", [3] * 200)):
        engine.add(name, prompt, max_tokens=1)
    engine.run()
    again = OracleEngine(store=store.restarted())
    again.add("a", LONG)
    again.run()
    assert (again.tokens("a") == ANSWER) == (executor is OracleExecutor)


@pytest.mark.parametrize(
    ("policy", "num_stored"), [("all", 13), ("prompt-only", 12), ("after-n-hits", 0)]
)
def test_the_store_policy_says_what_is_stored(policy: str, num_stored: int) -> None:
    store = OracleTierStore()
    engine = OracleEngine(store=store, kv_tiers=KVTierConfig(kv_store_policy=policy))
    engine.add("a", LONG, params=SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    engine.run()
    assert store.num_blocks == num_stored


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_after_n_hits_stores_what_was_asked_for_again_so_often(enable_prefix_caching: bool) -> None:
    store = OracleTierStore()
    config = KVTierConfig(kv_store_policy="after-n-hits", kv_store_min_hits=2)
    engine = OracleEngine(store=store, kv_tiers=config, enable_prefix_caching=enable_prefix_caching)
    for index, expected in enumerate((0, 0, 12)):
        engine.add(f"r{index}", LONG, max_tokens=1)
        engine.run()
        assert store.num_blocks == expected


# ── resets ──────────────────────────────────────────────────────────────────────────────────


class ResetForgetsTheFetches(TieredConnector[Request]):
    def reset(self, lora_name: str | Everything) -> tuple[list[Request], Forgetting]:
        fetches, self._fetches = self._fetches, Fetches(1, 0)
        reset = super().reset(lora_name)
        self._fetches = fetches
        return reset


class ResetForgetsTheSaves(TieredConnector[Request]):
    def reset(self, lora_name: str | Everything) -> tuple[list[Request], Forgetting]:
        saves, self._saves = self._saves, PendingSaves()
        reset = super().reset(lora_name)
        self._saves = saves
        return reset


@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("connector", [TieredConnector, ResetForgetsTheFetches])
def test_what_was_asked_for_before_a_reset_is_not_used_after_it(
    connector: type[TieredConnector[Request]], delay: int
) -> None:
    store = poisoned(stored(faults=Faults(delay=delay)))
    engine = OracleEngine(store=store, connector_class=connector, num_blocks=14)
    if delay == 0:  # the bytes are here, but there is no room to use them
        engine.add("holds", [3] * 100, params=SamplingParams(max_tokens=60, seed=1))
        engine.step()
    engine.add("a", LONG)
    for _ in range(3):
        engine.step()
    engine.core.handle(ResetPrefixCache(1))
    engine.run()
    assert (engine.tokens("a") == ANSWER) == (connector is TieredConnector)


@pytest.mark.parametrize("connector", [TieredConnector, ResetForgetsTheSaves])
def test_what_was_computed_before_a_reset_is_not_stored_after_it(
    connector: type[TieredConnector[Request]],
) -> None:
    store = OracleTierStore()
    engine = OracleEngine(store=store, connector_class=connector, max_num_batched_tokens=256)
    engine.add("a", LONG, max_tokens=1)
    while "a" not in engine.outputs:
        engine.step()
    engine.core.handle(ResetPrefixCache(1))
    engine.run()
    assert (store.num_blocks == 0) == (connector is TieredConnector)


def reset_an_adapter(store: OracleTierStore) -> OracleEngine:
    engine = OracleEngine(store=store)
    engine.load("a", "/a", "one")
    engine.run()
    engine.add("before", LONG, lora_name="a")
    engine.run()
    poisoned(store)
    store.holds_drops = True  # so that only the generation can keep them away
    engine.core.handle(ResetPrefixCache(1, "a"))
    engine.add("after", LONG, lora_name="a")
    engine.run()
    return engine


def test_an_adapters_new_generation_finds_none_of_the_old_kv_in_the_tiers() -> None:
    engine = reset_an_adapter(OracleTierStore(rng=random.Random(1)))
    assert engine.tokens("after") == engine.tokens("before")
    assert engine.num_cached("after") == 0


def test_an_adapters_reset_drops_its_kv_from_the_tiers() -> None:
    store = OracleTierStore()
    engine = OracleEngine(store=store)
    engine.load("a", "/a", "one")
    engine.run()
    for name in ("a", BASE_MODEL):
        engine.add(f"of {name}", LONG, lora_name=name)
    engine.run()
    assert {one.lora_name for one in store.namespaces.values()} == {"a", ""}
    engine.core.handle(ResetPrefixCache(1, "a"))
    assert {one.lora_name for one in store.namespaces.values()} == {""}
