from __future__ import annotations

import pytest

from lora_serve.fuzz.oracle import campaign
from lora_serve.fuzz.oracle.campaign import OracleTotals, run_campaign, run_trace
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.kv.event_recorder import KVEventRecorder
from tests.test_traces import KeyIgnoresTheAdapter


class BrokenTrace(OracleTrace):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, hasher_class=KeyIgnoresTheAdapter)


def test_a_campaign_runs_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "SEEDS_A_JOB", 2)  # several are begun before the first has ended
    totals = run_campaign(7, lambda totals: totals.num_requests < 200)
    assert totals.num_requests >= 200
    assert totals.failures == []
    expected = OracleTotals(7)
    for seed in range(7, 7 + totals.num_traces):
        expected.add(run_trace(seed))
    assert totals == expected
    assert min(totals.num_hit_tokens, totals.num_tier_tokens, totals.num_restarts) > 0
    assert totals.num_events > 0


@pytest.mark.parametrize("first_seed", [4, 5, 6, 7], ids=["", "tiers", "overlaps", "both"])
def test_a_campaign_catches_events_that_are_not_sent(
    first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVEventRecorder, "removed", lambda *_: None)
    results = (run_trace(seed, 40) for seed in range(first_seed, first_seed + 400, 8))
    failure = next(totals.failures[0] for totals in results if totals.failures)
    assert "which is not found" in failure.what
    assert run_trace(first_seed - 4, 40).failures == [], "no indexer reads this one's"


def test_a_failing_trace_is_cut_to_the_fewest_operations_that_still_fail() -> None:
    failing = (run_trace(seed, make=BrokenTrace) for seed in range(0, 400, 2))
    failure = next(totals.failures[0] for totals in failing if totals.failures)
    assert "answered something else" in failure.what
    again = run_trace(failure.seed, failure.num_operations, BrokenTrace)
    assert again.failures == [failure]
    shorter = run_trace(failure.seed, failure.num_operations - 1, BrokenTrace)
    assert shorter.failures == []
