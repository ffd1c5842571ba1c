from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common.processes import Footprint
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
from benchmarks.soak.verdict import Record, checks

MIB = 2**20
IDLE = Sample(
    seconds=0.0, api=Footprint(300 * MIB, 20, 10), engine=Footprint(400 * MIB, 20, 10),
    engine_pid=7, num_blocks=90, used_blocks=0, num_running=0, num_waiting=0, num_leases=0,
    disk_bytes=1000, answers_per_second=5.0, p50_ms=10.0, p99_ms=20.0, outcomes={},
)  # fmt: skip
TOTALS = dict.fromkeys(
    (
        "lora_serve:adapter_evictions_total",
        "vllm:num_preemptions_total",
        *(f"lora_serve:kv_tier_hit_blocks_total{{{tier}}}" for tier in ("ram", "disk", "redis")),
    ),
    1.0,
)
SAMPLES = [replace(IDLE, seconds=5.0 * number) for number in range(80)]
WELL = Record(
    counts={ANSWERED: 100, LEFT: 5, QUEUE_FULL: 3, GIVEN_UP: 1, RACED: 4, BAD_BODY: 9},
    totals=TOTALS,
    samples=SAMPLES, idle_before=IDLE, idle_after=IDLE, num_kills=2, num_loads=9,
    disk_bound=1000, health_p999_seconds=0.02, num_health_checks=1000,
)  # fmt: skip


def grown(sample: Sample) -> Footprint:
    """What it has where that grows by a tenth of a MiB a second."""
    return Footprint(int((300 + 0.1 * sample.seconds) * MIB), 9, 9)


def failed(record: Record) -> list[str]:
    return [check.title for check in checks(record) if not check.passed]


def test_a_soak_in_which_all_went_well_passes() -> None:
    assert failed(WELL) == []


@pytest.mark.parametrize(
    ("title", "worse"),
    [
        ("no wrong answer", replace(WELL, counts={**WELL.counts, WRONG: 1})),
        ("no unexpected error", replace(WELL, counts={**WELL.counts, UNEXPECTED: 1})),
        ("all blocks free at the end", replace(WELL, idle_after=replace(IDLE, used_blocks=1))),
        ("no request and no lease left", replace(WELL, idle_after=replace(IDLE, num_leases=1))),
        (
            "descriptors of the engine process are back",
            replace(WELL, idle_after=replace(IDLE, engine=Footprint(400 * MIB, 40, 10))),
        ),
        (
            "descriptors of the API process are back",
            replace(WELL, idle_after=replace(IDLE, api=Footprint(300 * MIB, 24, 10))),
        ),
        (
            "threads of the API process are back",
            replace(WELL, idle_after=replace(IDLE, api=Footprint(300 * MIB, 20, 30))),
        ),
        (
            "memory of the API process keeps its level, MiB",
            replace(WELL, samples=[replace(sample, api=grown(sample)) for sample in SAMPLES]),
        ),
        (
            "memory of the engine process keeps its level, MiB",
            replace(WELL, samples=[replace(sample, engine=grown(sample)) for sample in SAMPLES]),
        ),
        (
            "memory of the engine process keeps its level, MiB",
            replace(WELL, samples=[*SAMPLES[:-1], replace(SAMPLES[-1], engine_pid=8)]),
        ),
        ("the disk tier keeps its bound", replace(WELL, disk_bound=999)),
        (
            "no restart that no kill explains",
            replace(WELL, totals={**TOTALS, "lora_serve:engine_restarts_total": 3.0}),
        ),
        ("/health answers at its 99.9th percentile, ms", replace(WELL, health_p999_seconds=0.26)),
        ("/health answers at its 99.9th percentile, ms", replace(WELL, num_health_checks=0)),
        ("met: races of admins", replace(WELL, counts={**WELL.counts, RACED: 0})),
        ("met: hostile bodies", replace(WELL, counts={**WELL.counts, BAD_BODY: 0})),
        ("met: engines killed", replace(WELL, num_kills=0)),
        ("met: preemptions", replace(WELL, totals={**TOTALS, "vllm:num_preemptions_total": 0.0})),
    ],
)
def test_each_fault_fails_its_own_check(title: str, worse: Record) -> None:
    assert failed(worse) == [title]


def test_an_engine_may_take_memory_in_its_first_minute() -> None:
    """A new one has a third less than it comes to have, which a short soak took for growth."""
    fresh = Footprint(200 * MIB, 9, 9)
    samples = [replace(s, engine_pid=8) if s.seconds >= 100 else s for s in SAMPLES]
    samples = [replace(s, engine=fresh) if 100 <= s.seconds < 160 else s for s in samples]
    assert failed(replace(WELL, samples=samples)) == []
