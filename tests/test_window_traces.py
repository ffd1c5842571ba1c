"""Random lives of models whose layers see windows, and the bugs that they would catch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.fuzz.oracle.tiered_traces import TieredTrace
from lora_serve.fuzz.oracle.traces import FULL, GROUPS, NARROW, WIDE, OracleTrace
from lora_serve.identity import BlockHash
from lora_serve.kv.manager import BlockHolder, KVCacheManager
from lora_serve.kv.tiered_connector import TieredConnector
from lora_serve.kv_groups import KVGroup
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.request import Request

WINDOWED = sorted({groups for groups in GROUPS if groups != (FULL,)}, key=str)
MIXED = (FULL, NARROW)
NUM_TRACES = 10
NUM_TIERED_TRACES = 2


@pytest.mark.parametrize("groups", WINDOWED, ids=str)
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_every_answer_of_every_trace_is_the_lone_answer(
    groups: tuple[KVGroup, ...], is_overlapped: bool
) -> None:
    num_hit_tokens, num_preemptions = 0, 0
    for seed in range(NUM_TRACES):
        result = OracleTrace(seed, async_scheduling=is_overlapped, groups=groups).run()
        assert result.wrong == [], f"seed {seed}"
        num_hit_tokens += result.num_hit_tokens
        num_preemptions += result.num_preemptions
    assert num_hit_tokens > 100 * NUM_TRACES
    assert num_preemptions > 0 or FULL not in groups  # a narrow window leaves room for all


@pytest.mark.parametrize("groups", WINDOWED, ids=str)
def test_every_answer_over_failing_tiers_is_the_lone_answer(groups: tuple[KVGroup, ...]) -> None:
    num_tier_tokens = 0
    for seed in range(NUM_TIERED_TRACES):
        trace = TieredTrace(seed, async_scheduling=seed % 2 > 0, groups=groups)
        assert trace.run(200).wrong == [], f"seed {seed}"
        num_tier_tokens += trace.tiered.num_tier_tokens
    assert num_tier_tokens > 100 * NUM_TIERED_TRACES


@pytest.mark.slow
@pytest.mark.parametrize("groups", WINDOWED, ids=str)
def test_every_answer_of_many_traces_is_the_lone_answer(groups: tuple[KVGroup, ...]) -> None:
    for seed in range(10_000, 12_000):
        is_overlapped = seed % 2 > 0
        trace = OracleTrace(seed, async_scheduling=is_overlapped, groups=groups)
        assert trace.run().wrong == [], f"seed {seed}"
        tiered = TieredTrace(seed, async_scheduling=is_overlapped, groups=groups)
        assert tiered.run(200).wrong == [], f"tiered, seed {seed}"


# ── what a request holds ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_long_answer_holds_a_window_of_blocks(is_overlapped: bool) -> None:
    engine = OracleEngine(
        groups=(WIDE,), num_blocks=40, max_num_batched_tokens=32, async_scheduling=is_overlapped
    )
    prompt = list(range(100, 350))
    engine.add("r", prompt, params=SamplingParams(max_tokens=400, seed=1, ignore_eos=True))
    most = 0
    while engine.core.has_requests:
        engine.step()
        num_used = engine.kv.num_blocks - engine.kv.pool.num_free
        most = max(most, num_used)
        if engine.core.scheduler.totals.num_generated_tokens > 10:
            assert num_used <= 5  # 50 tokens in sight, 2 in flight
    assert most <= engine.kv.needs.blocks_of_request(650)
    assert len(engine.tokens("r")) > 100


@pytest.mark.parametrize("groups", WINDOWED, ids=str)
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_prompts_are_computed_to_their_end_once_they_are_admitted(
    groups: tuple[KVGroup, ...], is_overlapped: bool
) -> None:
    """However little room there is for others: a request without an answer is never preempted."""
    rng = random.Random(5)
    for _ in range(8):
        engine = OracleEngine(
            groups=groups,
            num_blocks=len(groups) * rng.randrange(20, 40),
            max_num_batched_tokens=rng.choice((20, 33, 64)),
            async_scheduling=is_overlapped,
        )
        prompts = [[rng.randrange(8, 12) for _ in range(rng.randrange(1, 300))] for _ in range(12)]
        prompts += [[*prompts[0][: rng.randrange(1, 300)], 9] for _ in range(6)]
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, max_tokens=1)
            if rng.random() < 0.5:
                engine.step()
        engine.run()
        assert engine.core.scheduler.totals.num_preemptions == 0
        for index, prompt in enumerate(prompts):
            expected = lone_answer(prompt, b"", 1, num_groups=len(groups))
            assert engine.tokens(str(index)) == expected


# ── bugs that are put back ──────────────────────────────────────────────────────────────────


def is_caught(make: Callable[[int], OracleTrace], num_traces: int = NUM_TRACES) -> bool:
    """Whether some trace gives a wrong answer or breaks an invariant."""
    for seed in range(num_traces):
        try:
            if make(seed).run().wrong:
                return True
        except (AssertionError, LookupError):
            return True
    return False


class FreesTooEarly(KVCacheManager):
    """Frees a block more than what later tokens do not see; its own books agree with that."""

    def free_unseen(self, holder: BlockHolder, num_computed_tokens: int) -> None:
        if num_computed_tokens > 40:
            super().free_unseen(holder, num_computed_tokens + self.block_size // 2)

    def check_tables(self, holder: BlockHolder, num_computed: int, num_scheduled: int) -> None:
        """It is the answers that have to show it."""


class FreesWhatIsInFlight(KVCacheManager):
    """Frees by what has been scheduled: a step in flight still reads some of it."""

    def free_unseen(self, holder: BlockHolder, num_computed_tokens: int) -> None:
        assert isinstance(holder, Request)
        super().free_unseen(holder, holder.num_scheduled_tokens)


class HitsWithoutTheWindow(KVCacheManager):
    """Believes that what full layers have the windowed ones have, too."""

    def _num_seen_whole(self, hashes: Sequence[BlockHash]) -> int:
        return len(hashes)


class CommitsWhatItFreed(KVCacheManager):
    """Frees before it commits, and names what stands in the table."""

    def commit(self, holder: BlockHolder, num_computed_tokens: int) -> range:
        self.free_unseen(holder, num_computed_tokens)
        unseen = [table.num_unseen for table in holder.block_tables]
        for table in holder.block_tables:
            table.num_unseen = 0
        written = super().commit(holder, num_computed_tokens)
        for table, num_unseen in zip(holder.block_tables, unseen, strict=True):
            table.num_unseen = num_unseen
        return written


@pytest.mark.parametrize(
    "mutant", [FreesTooEarly, FreesWhatIsInFlight, HitsWithoutTheWindow, CommitsWhatItFreed]
)
def test_traces_catch_a_kv_manager_that(mutant: type[KVCacheManager]) -> None:
    def trace(seed: int) -> OracleTrace:
        return OracleTrace(seed, kv_class=mutant, async_scheduling=True, groups=MIXED)

    assert is_caught(trace)


class MixesGroupsUp(TieredConnector[Request]):
    """Puts each block of a record where another group's should be."""

    def _save(self, request: Request, blocks: Sequence[int]) -> None:
        request.block_tables.reverse()
        super()._save(request, blocks)
        request.block_tables.reverse()


class SavesWhatItDoesNotHold(TieredConnector[Request]):
    """Stores a place of the chain of which a window's block is gone."""

    def _save(self, request: Request, blocks: Sequence[int]) -> None:
        unseen = [table.num_unseen for table in request.block_tables]
        for table in request.block_tables:
            table.num_unseen = 0
        super()._save(request, blocks)
        for table, num_unseen in zip(request.block_tables, unseen, strict=True):
            table.num_unseen = num_unseen


class SavesAfterHits(TieredTrace):
    """Stores what it found, of which a window may hold no more than the end."""

    def _new_engine(self) -> OracleEngine:
        if "kv_tiers" in self.settings:
            changes = {"kv_store_policy": "after-n-hits", "kv_store_min_hits": 1}
            self.settings["kv_tiers"] = replace(self.settings["kv_tiers"], **changes)
            self.settings["enable_prefix_caching"] = True
        return super()._new_engine()


@pytest.mark.parametrize(
    ("make", "mutant"), [(TieredTrace, MixesGroupsUp), (SavesAfterHits, SavesWhatItDoesNotHold)]
)
def test_traces_catch_a_connector_that(
    make: type[TieredTrace], mutant: type[TieredConnector[Request]]
) -> None:
    assert is_caught(lambda seed: make(seed, connector_class=mutant, groups=MIXED))
