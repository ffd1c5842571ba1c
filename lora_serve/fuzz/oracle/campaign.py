"""Runs many oracle traces on all cores. A trace follows from its seed alone.

Even seeds are lives of one engine, odd ones lives of several over KV tiers that fail; in half of
each, steps overlap, and in half of each of these an indexer reads the engine's KV events. Counts in
the order of the seeds, so that a call repeated gives the same.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count

import msgspec

from lora_serve.fuzz.oracle.expected import TraceResult
from lora_serve.fuzz.oracle.tiered_traces import TieredResult, TieredTrace
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.kv.event_recorder import KVEventRecorder

NUM_OPERATIONS = 60
NUM_TIERED_OPERATIONS = 200
SEEDS_A_JOB = 4

MakeTrace = Callable[[int], OracleTrace]


class OracleFailure(msgspec.Struct, frozen=True):
    """num_operations: the fewest after which this seed's trace fails."""

    seed: int
    num_operations: int
    what: str


class OracleTotals(msgspec.Struct):
    """The sums over traces. refused: for adapters whose files had changed, and failing tiers.

    events: of KV, that an indexer has read.
    """

    first_seed: int = 0
    num_traces: int = 0
    num_requests: int = 0
    num_hit_tokens: int = 0
    num_tier_tokens: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0
    num_restarts: int = 0
    num_refused: int = 0
    num_events: int = 0
    failures: list[OracleFailure] = []

    def add(self, other: OracleTotals) -> None:
        for name in self.__struct_fields__:
            if name != "first_seed":
                setattr(self, name, getattr(self, name) + getattr(other, name))


def make_trace(seed: int) -> OracleTrace:
    trace = TieredTrace if seed % 2 else OracleTrace
    recorder = KVEventRecorder if seed % 8 >= 4 else None
    return trace(seed, async_scheduling=seed % 4 >= 2, recorder_class=recorder)


def default_num_operations(seed: int) -> int:
    return NUM_TIERED_OPERATIONS if seed % 2 else NUM_OPERATIONS


def run_campaign(first_seed: int, wants_more: Callable[[OracleTotals], bool]) -> OracleTotals:
    """Traces from `first_seed` on, until `wants_more` has enough of them or one has failed."""
    totals = OracleTotals(first_seed)
    for part in _parts(first_seed):
        totals.add(part)
        if totals.failures or not wants_more(totals):
            return totals
    raise AssertionError("seeds never end")


def run_trace(
    seed: int, num_operations: int | None = None, make: MakeTrace = make_trace
) -> OracleTotals:
    """One trace; if it fails, with the fewest operations after which it does."""
    totals = OracleTotals(seed, num_traces=1)
    what = _fault(seed, num_operations or default_num_operations(seed), make, totals)
    if what:
        fewest, what = _fewest_operations(seed, make, what)
        totals.failures = [OracleFailure(seed, fewest, what)]
    return totals


def _parts(first_seed: int) -> Iterator[OracleTotals]:
    """Give the traces' totals in the order of their seeds, while others are being run."""
    num_processes = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"))
    pending: deque[Future[OracleTotals]] = deque()
    try:
        for seed in count(first_seed, SEEDS_A_JOB):
            pending.append(pool.submit(_run_seeds, seed, seed + SEEDS_A_JOB))
            if len(pending) > 2 * num_processes:
                yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _run_seeds(first: int, end: int) -> OracleTotals:
    totals = OracleTotals(first)
    for seed in range(first, end):
        totals.add(run_trace(seed))
    return totals


def _fault(seed: int, num_operations: int, make: MakeTrace, totals: OracleTotals) -> str:
    """What is wrong with a trace, or ""; its counts are added to `totals`."""
    trace = make(seed)
    try:
        result = trace.run(num_operations)
    except Exception as error:  # whatever a broken engine raises is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{where.name}: {type(error).__name__}: {str(error) or where.line}"
    _count(result, totals)
    totals.num_events += trace.num_events
    return f"{', '.join(result.wrong)} answered something else" if result.wrong else ""


def _count(result: TraceResult, totals: OracleTotals) -> None:
    totals.num_requests += result.num_requests
    totals.num_hit_tokens += result.num_hit_tokens
    totals.num_preemptions += result.num_preemptions
    totals.num_evictions += result.num_evictions
    totals.num_refused += result.num_lost
    if isinstance(result, TieredResult):
        totals.num_tier_tokens += result.num_tier_tokens
        totals.num_restarts += result.num_restarts
        totals.num_refused += result.num_failed


def _fewest_operations(seed: int, make: MakeTrace, what: str) -> tuple[int, str]:
    """Cut a failing trace: its operations do not depend on how many there are."""
    for num_operations in range(1, default_num_operations(seed)):
        shorter = _fault(seed, num_operations, make, OracleTotals())
        if shorter:
            return num_operations, shorter
    return default_num_operations(seed), what
