"""The benchmark of drafts on a tiny model: equal answers, and ratios of turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed.speculation import WORKLOADS, Turns, measure, table_line
from lora_serve import LLM


def test_each_workload_is_answered_alike_with_drafts_and_without(model_path: Path) -> None:
    size = {"cpu_threads": 1, "num_gpu_blocks_override": 2000, "max_num_seqs": 16}
    settings = {"method": "suffix", "measure_row_costs": False}
    with (
        LLM(str(model_path), **size) as without,
        LLM(str(model_path), speculative_config=settings, **size) as drafting,
    ):
        gain = measure(WORKLOADS["the same again"], (without, drafting), 2, 12, 1, 8)
        random = Turns(WORKLOADS["random text"], (without, drafting), 2)
        for index in range(2):
            assert random.tokens_a_second(index, 4) > 0
    random.require_equal_answers()
    assert gain.fewer_steps > 1.5
    assert gain.accepted > 0.5
    assert gain.ideal >= 1.0
    assert gain.least == gain.ratio == gain.most
    assert table_line(gain).startswith("| the same again | 2 | 1 |")


def test_answers_that_differ_are_no_figure() -> None:
    turns = Turns.__new__(Turns)
    turns._workload = WORKLOADS["quoting"]
    turns._answers = [[[1]], [[2]]]
    with pytest.raises(AssertionError, match="quoting: answers differ"):
        turns.require_equal_answers()
