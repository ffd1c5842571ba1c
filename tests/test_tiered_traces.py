"""Random lives of engines over KV tiers that fail, and the bugs that these traces would catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from msgspec import structs

from lora_serve.fuzz.oracle.executor import OracleExecutor
from lora_serve.fuzz.oracle.tiered_traces import TieredResult, TieredTrace
from lora_serve.identity import BlockHasher
from lora_serve.kv.fetches import Fetch
from lora_serve.kv.tiered_connector import TieredConnector
from lora_serve.scheduler.request import Request
from lora_serve.step import KVLoad, ModelRunnerOutput, SchedulerOutput
from tests.fakes.mutant_hashers import (
    KeyHoldsOnlyTheName,
    KeyIgnoresEmbeds,
    KeyIgnoresTheAdapter,
)

NUM_TRACES = 14
NUM_OPERATIONS = 200


def run_traces(seeds: Sequence[int]) -> TieredResult:
    total = TieredResult()
    for seed in seeds:
        result = TieredTrace(seed).run(NUM_OPERATIONS)
        assert isinstance(result, TieredResult)
        total.num_requests += result.num_requests
        total.num_tier_tokens += result.num_tier_tokens
        total.num_restarts += result.num_restarts
        total.num_cancelled += result.num_cancelled
        total.num_preemptions += result.num_preemptions
        total.num_failed += result.num_failed
        total.num_handed_over += result.num_handed_over
        total.wrong += [f"seed {seed}: {name}" for name in result.wrong]
    return total


def test_every_answer_over_failing_tiers_is_the_lone_answer() -> None:
    result = run_traces(range(NUM_TRACES))
    assert result.wrong == []
    # The traces mean something only if tiers give, engines restart, and waiting is cut short.
    assert result.num_requests > 50 * NUM_TRACES
    assert result.num_tier_tokens > 200 * NUM_TRACES
    assert result.num_restarts > 5 * NUM_TRACES
    assert result.num_preemptions > NUM_TRACES
    assert result.num_cancelled > 5
    assert result.num_failed > 2
    assert result.num_handed_over > 3 * NUM_TRACES


@pytest.mark.slow
def test_every_answer_of_many_traces_over_failing_tiers_is_the_lone_answer() -> None:
    assert run_traces(range(10_000, 20_000)).wrong == []


class LoadsAfterCompute(OracleExecutor):
    """Offers blocks that are still on their way."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(structs.replace(step, kv_loads=()))
        for load in step.kv_loads:
            self.scatter(load)
        return output


class LoadsNothing(OracleExecutor):
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return super().execute(structs.replace(step, kv_loads=()))


class IgnoresWhereTheHitEnds(TieredConnector[Request]):
    """Loads what was fetched, wherever the device cache's hit ends by now."""

    def admitted(self, request: Request, num_hit_blocks: int) -> dict[str, int]:
        fetch = self._fetches.in_hand(request)
        if fetch is None:
            return super().admitted(request, num_hit_blocks)
        start = num_hit_blocks
        blocks = fetch.blocks[: request.num_sharable_blocks - start]
        block_ids = request.block_tables[0].block_ids
        self._loads += [KVLoad(block_ids[start + i], block) for i, block in enumerate(blocks)]
        self.forget(request)
        return {"ram": len(blocks), "disk": 0}


class IgnoresWhoseChainItIs(TieredConnector[Request]):
    """Gives every request that waited for a fetch all of its blocks."""

    def admitted(self, request: Request, num_hit_blocks: int) -> dict[str, int]:
        fetch: Fetch[Request] | None = self._fetches.in_hand(request)
        if fetch is not None:
            fetch.hashes = tuple(request.block_hashes[fetch.first_block :])[: len(fetch.hashes)]
        return super().admitted(request, num_hit_blocks)


def is_caught(make: Callable[[int], TieredTrace], first_seed: int = 0) -> bool:
    """Whether some trace gives a wrong answer or breaks an invariant.

    first_seed: those before it are known to catch nothing.
    """
    for seed in range(first_seed, first_seed + 40):
        try:
            if make(seed).run(NUM_OPERATIONS).wrong:
                return True
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("mutant", [KeyHoldsOnlyTheName, KeyIgnoresTheAdapter, KeyIgnoresEmbeds])
def test_traces_catch_a_key_of_the_tiers_that(mutant: type[BlockHasher]) -> None:
    class OnlyTiers(TieredTrace):
        """A trace without the device cache, so that it is the tiers' key that is caught."""

        def _new_engine(self):  # type: ignore[no-untyped-def]
            self.settings["enable_prefix_caching"] = False
            return super()._new_engine()

    assert is_caught(lambda seed: OnlyTiers(seed, hasher_class=mutant))


@pytest.mark.parametrize("mutant", [LoadsAfterCompute, LoadsNothing])
def test_traces_catch_a_worker_that(mutant: type[OracleExecutor]) -> None:
    assert is_caught(lambda seed: TieredTrace(seed, executor_class=mutant))


@pytest.mark.parametrize(
    ("mutant", "first_seed"), [(IgnoresWhereTheHitEnds, 0), (IgnoresWhoseChainItIs, 7)]
)
def test_traces_catch_a_connector_that(
    mutant: type[TieredConnector[Request]], first_seed: int
) -> None:
    assert is_caught(lambda seed: TieredTrace(seed, connector_class=mutant), first_seed)
