from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common.processes import Footprint
from benchmarks.soak.tiers import Diary, Look, Plan, checks

PLAN = Plan(seconds=60.0, seed=1, num_clients=1, num_questions=1, num_salts=1, disk_bytes=1_000_000)
ENGINE = Footprint(100 << 20, 20, 10)
LEFT = {"staged": 0, "trash": 0, "groups": 4, "unreadable": 0}
TOTALS = {
    "lora_serve:kv_tier_saved_bytes_total{disk}": 5e6,
    "lora_serve:kv_tier_evicted_blocks_total{disk}": 9.0,
    "lora_serve:kv_tier_hit_blocks_total{disk}": 9.0,
}


def a_diary() -> Diary:
    diary = Diary(looks=[Look([ENGINE, ENGINE], 40, 900_000) for _ in range(12)])
    diary.counts.update(answered=10, killed=1, dropped=1)
    diary.totals[0].values |= TOTALS
    return diary


def failed(diary: Diary, left: dict[str, int] = LEFT, working_set: int = 4_000_000) -> list[str]:
    return [check.title for check in checks(PLAN, diary, working_set, left) if not check.passed]


def test_a_soak_in_which_all_was_well_passes() -> None:
    assert failed(a_diary()) == []


@pytest.mark.parametrize(
    ("what", "title"),
    [("wrong", "no wrong answer"), ("unexpected", "no unexpected error")],
)
def test_one_bad_answer_fails_it(what: str, title: str) -> None:
    diary = a_diary()
    diary.blame(what, "a story")
    assert failed(diary) == [title]


def test_a_moment_above_the_bound_fails_it() -> None:
    diary = a_diary()
    diary.looks[5] = replace(diary.looks[5], num_bytes=1_000_001)
    assert failed(diary) == ["the disk keeps its bound"]


def test_files_and_memory_that_grow_to_the_end_fail_it() -> None:
    diary = a_diary()
    large = Footprint(110 << 20, 20, 10)
    diary.looks[9:] = [Look([large, large], 70, 900_000)] * 3
    assert failed(diary) == ["files keep their level", "memory of engines, MiB keep their level"]


@pytest.mark.parametrize("what", ["staged", "trash"])
def test_what_is_left_behind_fails_it(what: str) -> None:
    assert failed(a_diary(), {**LEFT, what: 1}) == ["nothing is left behind"]


def test_a_bound_that_holds_everything_proves_nothing() -> None:
    assert failed(a_diary(), working_set=900_000) == ["met: the working set, in bounds"]
