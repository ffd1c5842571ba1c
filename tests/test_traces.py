"""Random lives of an engine against the oracle, and the bugs that the traces would catch.

Each mutant puts a known bug back. A guard that no mutant tests is no guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.lanes import Lane, LoadJob, ReadTask
from lora_serve.adapters.loader import LoadResult, Outcome
from lora_serve.fuzz.oracle.expected import TraceResult
from lora_serve.fuzz.oracle.loader import OracleLoader
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.identity import BlockHash, BlockHasher, NoAdapter, embeds_digest
from lora_serve.kv.blocks import BlockPool, KVCacheBlock
from lora_serve.kv.manager import BlockHolder, CacheHit, KVCacheManager
from lora_serve.scheduler.request import Request
from tests.fakes.mutant_hashers import (
    KeyHoldsOnlyTheName,
    KeyIgnoresEmbeds,
    KeyIgnoresTheActivation,
    KeyIgnoresTheAdapter,
    KeyIgnoresTheParent,
)

NUM_TRACES = 30


def run_traces(
    seeds: Sequence[int],
    kv_class: type[KVCacheManager] = KVCacheManager,
    hasher_class: type[BlockHasher] = BlockHasher,
) -> TraceResult:
    """All traces' results, added up."""
    total = TraceResult()
    for seed in seeds:
        result = OracleTrace(seed, kv_class, hasher_class).run()
        total.num_requests += result.num_requests
        total.num_hit_tokens += result.num_hit_tokens
        total.num_preemptions += result.num_preemptions
        total.num_evictions += result.num_evictions
        total.num_timeouts += result.num_timeouts
        total.num_late_reads += result.num_late_reads
        total.wrong += [f"seed {seed}: {name}" for name in result.wrong]
    return total


def test_every_answer_of_every_trace_is_the_lone_answer() -> None:
    result = run_traces(range(NUM_TRACES))
    assert result.wrong == []
    # The traces mean something only if they hit, preempt, evict, and read what hangs.
    assert result.num_requests > 20 * NUM_TRACES
    assert result.num_hit_tokens > 100 * NUM_TRACES
    assert result.num_preemptions > NUM_TRACES
    assert result.num_evictions > NUM_TRACES / 10
    assert result.num_timeouts > NUM_TRACES / 4
    assert result.num_late_reads > NUM_TRACES / 10


@pytest.mark.slow
def test_every_answer_of_many_traces_is_the_lone_answer() -> None:
    assert run_traces(range(10_000, 30_000)).wrong == []


class OffersWhenAdmitted(KVCacheManager):
    """Registers blocks when they are scheduled, before the step that writes them has run."""

    def admit(self, holder: BlockHolder, hit: CacheHit, num_found: int, num_tokens: int) -> bool:
        if not super().admit(holder, hit, num_found, num_tokens):
            return False
        self.commit(holder, num_tokens)
        return True


class _ForgetfulPool(BlockPool):
    """Reuses a block without forgetting the hash it was found by."""

    def _forget(self, block: KVCacheBlock) -> None:
        if block.ref_cnt:
            super()._forget(block)

    def cache(
        self, block: KVCacheBlock, block_hash: BlockHash, lora_name: str | NoAdapter, group: int = 0
    ) -> None:
        if block.block_hash is not None:
            BlockPool._forget(self, block)
        super().cache(block, block_hash, lora_name, group)


class ForgetsToUncache(KVCacheManager):
    def __init__(self, num_blocks: int, *args: Any) -> None:
        super().__init__(num_blocks, *args)
        self.pool = _ForgetfulPool(num_blocks, len(self.needs.groups))


def is_caught(
    kv_class: type[KVCacheManager] = KVCacheManager,
    hasher_class: type[BlockHasher] = BlockHasher,
    loader_class: type[OracleLoader] = OracleLoader,
    first_seed: int = 0,
) -> bool:
    """Whether some trace gives a wrong answer or breaks an invariant.

    first_seed: those before it are known to catch nothing.
    """
    for seed in range(first_seed, first_seed + 40):
        try:
            trace = OracleTrace(seed, kv_class, hasher_class, loader_class=loader_class)
            if trace.run().wrong:
                return True
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("mutant", [OffersWhenAdmitted, ForgetsToUncache])
def test_traces_catch_a_kv_manager_that(mutant: type[KVCacheManager]) -> None:
    assert is_caught(kv_class=mutant)


def test_traces_catch_a_scheduler_that_finds_a_block_too_many_before_prompt_logprobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findable = Request.num_findable_tokens.fget
    assert findable is not None

    def a_block_too_many(request: Request) -> int:
        return min(findable(request) + request.block_size, request.num_tokens - 1)

    monkeypatch.setattr(Request, "num_findable_tokens", property(a_block_too_many))
    assert is_caught()


@pytest.mark.parametrize(
    ("mutant", "first_seed"),
    [
        (KeyHoldsOnlyTheName, 28),
        (KeyIgnoresTheActivation, 0),
        (KeyIgnoresTheAdapter, 0),
        (KeyIgnoresEmbeds, 0),
        (KeyIgnoresTheParent, 0),
    ],
)
def test_traces_catch_an_identity_where_the(mutant: type[BlockHasher], first_seed: int) -> None:
    assert is_caught(hasher_class=mutant, first_seed=first_seed)


def test_traces_catch_an_identity_that_ignores_where_rows_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "lora_serve.prompts.placed_embeds_digest", lambda rows, places: embeds_digest(rows)
    )
    assert is_caught()


class GivesNoReadUp(OracleLoader):
    """A read may take for ever, whatever the deadline."""

    def _give_up_overdue(self) -> None:
        pass


class PublishesLateReads(OracleLoader):
    """What was given up takes effect after all, when it has been read."""

    def _give_up(self, lane: Lane, task: ReadTask) -> None:
        super()._give_up(lane, task)
        task.end_lock.release()

    def _take_in(self, lane: Lane, task: ReadTask, outcome: Outcome) -> None:
        super()._take_in(lane, task, outcome)
        if task.is_given_up and isinstance(outcome, AdapterCheckpoint):
            self._results.append(LoadResult(task.job, outcome))
            self._num_pending += 1


class ReadsCallsOfOneNameAtOnce(OracleLoader):
    """A call does not wait for those before it that name the same adapter."""

    def submit(self, job: LoadJob) -> None:
        super().submit(job)
        if job.call is not None:
            waiting = [task for task in self._calls[job.call.lora_name] if task.job is job]
            self._loads.queue += [task for task in waiting if not task.is_reading]
            self._start_reads()

    def _end_call(self, task: ReadTask, name: str) -> None:
        self._calls[name].remove(task)


@pytest.mark.parametrize("mutant", [GivesNoReadUp, PublishesLateReads, ReadsCallsOfOneNameAtOnce])
def test_traces_catch_a_loader_that(mutant: type[OracleLoader]) -> None:
    assert is_caught(loader_class=mutant)
