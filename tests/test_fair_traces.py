"""Random lives with fair shares, in which crowds take all places, and bugs of giving way put back.

What is held of each step stands in `lora_serve/fuzz/oracle/places.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.kv_groups import KVGroup
from lora_serve.scheduler.scheduler import Scheduler
from tests.fakes.mutant_schedulers import FAIRNESS_MUTANTS

NUM_TRACES = 20


class FairTrace(OracleTrace):
    """A trace with few places, all of them taken again and again."""

    def _drawn_settings(self, groups: tuple[KVGroup, ...]) -> dict[str, Any]:
        settings = super()._drawn_settings(groups)
        return settings | {
            "fair_share": self.other_rng.choice(("adapter", "key")),
            "max_num_seqs": self.other_rng.choice((2, 3, 4)),
        }


def fair_trace(seed: int, scheduler_class: type[Scheduler]) -> FairTrace:
    trace = FairTrace(seed)
    trace.engine.core.scheduler.__class__ = scheduler_class
    return trace


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_answer_of_every_trace_with_fair_shares_is_the_lone_answer(
    async_scheduling: bool,
) -> None:
    num_given_way = 0
    for seed in range(NUM_TRACES):
        trace = FairTrace(seed, async_scheduling=async_scheduling)
        assert trace.run().wrong == [], f"seed {seed}"
        num_given_way += trace.result.num_given_way
    assert num_given_way > NUM_TRACES


@pytest.mark.parametrize("mutant", FAIRNESS_MUTANTS)
def test_traces_catch_a_scheduler_that(mutant: type[Scheduler]) -> None:
    assert any(_is_caught(mutant, seed) for seed in range(40))


def _is_caught(mutant: type[Scheduler], seed: int) -> bool:
    try:
        return bool(fair_trace(seed, mutant).run().wrong)
    except AssertionError:
        return True
