from __future__ import annotations

import numpy
import pytest

from lora_serve.bench.summary import Spread, percentile, summarize
from tests.bench.records import record, run_of


def test_percentiles_are_those_of_numpy() -> None:
    values = sorted(numpy.random.default_rng(0).random(37).tolist())
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(numpy.quantile(values, share))
    assert percentile([3.0], 0.99) == 3.0


def test_a_spread_is_in_milliseconds() -> None:
    spread = Spread.of_seconds([0.1, 0.3])
    assert spread is not None
    assert (spread.mean, spread.p50) == (pytest.approx(200), pytest.approx(200))
    assert Spread.of_seconds([]) is None


def test_rates_are_over_the_runs_whole_time() -> None:
    total = summarize(run_of(record(), record(), record()).result).total
    assert total.output_tokens_per_second == 15 / 2.0
    assert total.total_tokens_per_second == 45 / 2.0
    assert total.requests_per_second == 3 / 2.0
    assert total.tokens_per_event == 1.0


def test_failed_requests_are_counted_and_give_no_latency() -> None:
    summary = summarize(run_of(record(), record(error="HTTP 500"), record(error="HTTP 500")).result)
    assert (summary.total.num_requests, summary.total.num_failed) == (3, 2)
    assert summary.errors == {"HTTP 500": 2}
    assert summary.total.requests_per_second == 0.5
    assert summary.total.ttft is not None
    assert summary.total.ttft.p99 == pytest.approx(100)


def test_a_run_in_which_all_fails_has_no_latencies() -> None:
    total = summarize(run_of(record(error="refused")).result).total
    assert (total.ttft, total.tpot, total.itl, total.e2e) == (None, None, None, None)
    assert total.output_tokens_per_second == 0


def test_each_adapter_and_the_base_are_summed_up_apart() -> None:
    summary = summarize(run_of(record("x", ttft=0.3), record(), record("x", ttft=0.1)).result)
    assert list(summary.by_adapter) == ["base", "x"]
    x = summary.by_adapter["x"]
    assert x.num_requests == 2
    assert x.ttft is not None
    assert x.ttft.p50 == pytest.approx(200)
