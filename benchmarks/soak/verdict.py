"""Whether all was well: what must hold at the end of a soak, each with the figures that say so.

A soak in which nothing went wrong on purpose proves nothing, so what it must have met is checked
as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.checks import Check, level
from benchmarks.soak.journal import (
    ANSWERED,
    BAD_BODY,
    GIVEN_UP,
    LEFT,
    QUEUE_FULL,
    RACED,
    UNEXPECTED,
    WRONG,
)
from benchmarks.soak.samples import Sample

MORE_DESCRIPTORS = 3  # one that is just being closed, and its like
HEALTH_SECONDS = 0.25  # in which 999 of 1,000 probes must be answered, kills and floods included
WARM_SECONDS = 60.0  # in which a new engine records steps and touches its pool
MORE_THREADS = 8  # of a pool that grows with what is asked at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """idle_before, idle_after: with no traffic, once all is warm, and when all has ended."""

    counts: Mapping[str, int]
    totals: Mapping[str, float]
    samples: Sequence[Sample]
    idle_before: Sample
    idle_after: Sample
    num_kills: int
    num_loads: int
    disk_bound: int
    health_p999_seconds: float
    num_health_checks: int


def checks(record: Record) -> list[Check]:
    return [
        *_of_answers(record),
        _of_restarts(record),
        _of_health(record),
        *_of_the_end(record),
        *_of_memory(record.samples),
        _of_the_disk(record),
        *_of_what_was_met(record),
    ]


def _of_answers(record: Record) -> list[Check]:
    counts = record.counts
    return [
        Check("no wrong answer", not counts.get(WRONG), f"{counts.get(WRONG, 0)} of "
              f"{counts.get(ANSWERED, 0) + counts.get(LEFT, 0):,}"),
        Check("no unexpected error", not counts.get(UNEXPECTED), f"{counts.get(UNEXPECTED, 0)}"),
    ]  # fmt: skip


def _of_restarts(record: Record) -> Check:
    num_restarts = int(record.totals.get("lora_serve:engine_restarts_total", 0))
    return Check("no restart that no kill explains", num_restarts <= record.num_kills,
                 f"{num_restarts} restarts, {record.num_kills} kills")  # fmt: skip


def _of_health(record: Record) -> Check:
    milliseconds, num = 1e3 * record.health_p999_seconds, record.num_health_checks
    return Check("/health answers at its 99.9th percentile, ms",
                 num > 0 and record.health_p999_seconds <= HEALTH_SECONDS,
                 f"{milliseconds:,.0f} of {1e3 * HEALTH_SECONDS:,.0f}, {num:,} probes")  # fmt: skip


def _of_the_end(record: Record) -> list[Check]:
    before, after = record.idle_before, record.idle_after
    found = [
        Check("all blocks free at the end", after.used_blocks == 0 and after.num_blocks > 0,
              f"{after.used_blocks:g} of {after.num_blocks:g} used"),
        Check("no request and no lease left", not (after.num_running or after.num_waiting
              or after.num_leases), f"{after.num_running:g} running, {after.num_waiting:g} "
              f"waiting, {after.num_leases} leases"),
    ]  # fmt: skip
    for name, then, now in (
        ("API", before.api, after.api),
        ("engine", before.engine, after.engine),
    ):
        descriptors = now.num_descriptors - then.num_descriptors
        threads = now.num_threads - then.num_threads
        found += [
            Check(f"descriptors of the {name} process are back", descriptors <= MORE_DESCRIPTORS,
                  f"{then.num_descriptors} before, {now.num_descriptors} after"),
            Check(f"threads of the {name} process are back", threads <= MORE_THREADS,
                  f"{then.num_threads} before, {now.num_threads} after"),
        ]  # fmt: skip
    return found


def _of_memory(samples: Sequence[Sample]) -> list[Check]:
    """Compares the second quarter with the last, and of the engine that lives the thirds."""
    api = [sample.api.rss_bytes / 2**20 for sample in samples]
    quarter = len(api) // 4
    engine = _of_living_engine(samples)
    third = len(engine) // 3
    return [
        level("memory of the API process keeps its level, MiB",
              api[quarter : 2 * quarter], api[-quarter:]),
        level("memory of the engine process keeps its level, MiB",
              engine[:third], engine[2 * third :]),
    ]  # fmt: skip


def _of_living_engine(samples: Sequence[Sample]) -> list[float]:
    """MiB of the engine that lived last, once it had met what it takes memory for once."""
    of_it = [sample for sample in samples if sample.engine_pid == samples[-1].engine_pid]
    warm = of_it[0].seconds + WARM_SECONDS
    return [sample.engine.rss_bytes / 2**20 for sample in of_it if sample.seconds >= warm]


def _of_the_disk(record: Record) -> Check:
    most = max(sample.disk_bytes for sample in record.samples)
    return Check("the disk tier keeps its bound", most <= record.disk_bound,
                 f"{most / 2**20:.1f} of {record.disk_bound / 2**20:.1f} MiB")  # fmt: skip


def _of_what_was_met(record: Record) -> list[Check]:
    counts, totals = record.counts, record.totals
    met = {
        "engines killed": record.num_kills,
        "adapters loaded": record.num_loads,
        "races of admins": counts.get(RACED, 0),
        "hostile bodies": counts.get(BAD_BODY, 0),
        "adapters evicted": totals.get("lora_serve:adapter_evictions_total", 0),
        "preemptions": totals.get("vllm:num_preemptions_total", 0),
        "refused for a full queue": counts.get(QUEUE_FULL, 0),
        "left by the client": counts.get(LEFT, 0),
        "slow readers given up": counts.get(GIVEN_UP, 0),
        "blocks from RAM": totals.get("lora_serve:kv_tier_hit_blocks_total{ram}", 0),
        "blocks from disk": totals.get("lora_serve:kv_tier_hit_blocks_total{disk}", 0),
        "blocks from Redis": totals.get("lora_serve:kv_tier_hit_blocks_total{redis}", 0),
    }
    return [Check(f"met: {what}", count > 0, f"{count:,.0f}") for what, count in met.items()]
