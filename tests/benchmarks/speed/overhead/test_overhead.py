from __future__ import annotations

import pytest

pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")

from benchmarks.speed.overhead.__main__ import COLUMNS, HEAD, row_of, table_line
from benchmarks.speed.overhead.engine import Shape, Threads, decode_steps, prefill_steps
from benchmarks.speed.overhead.stopwatch import Stopwatch, Timed, medians

TINY = Shape("tiny", 500, 64, 128, 2, 1, 1)


def test_the_parts_of_a_real_step_add_up_to_it() -> None:
    steps = decode_steps(TINY, threads=Threads(1), num_requests=3, num_steps=4)
    assert len(steps) == 4
    row = row_of("tiny", 3, steps)
    assert set(row.parts) == set(COLUMNS)
    assert all(time > 0 for time in row.parts.values())
    assert 0 < row.python_share < 1
    assert table_line(row).count("|") == HEAD.count("|")


def test_a_prompt_is_timed_kernel_by_kernel() -> None:
    steps = prefill_steps(TINY, threads=Threads(1), num_tokens=40, num_steps=2)
    assert len(steps) == 2
    for step in steps:
        kernels = [step[name] for name in ("linear", "gated_linear", "attention", "norm")]
        assert min(kernels) > 0
        assert sum(kernels) < step["step"]


def test_a_part_that_a_step_did_not_have_took_no_time_in_it() -> None:
    assert medians([{"a": 3.0}, {"a": 1.0, "b": 9.0}, {"a": 2.0}]) == {"a": 2.0, "b": 0.0}


def test_a_timed_object_gives_what_its_target_gives() -> None:
    watch = Stopwatch()
    stands_for = Timed([3, 1, 2], watch, {"index": "search"})
    assert stands_for.index(2) == 2
    assert stands_for.count(1) == 1
    assert list(watch.take()) == ["search"]
    assert watch.take() == {}
