from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from lora_serve.config import LogConfig
from lora_serve.engine_stats import EngineStats
from lora_serve.errors import EngineDeadError
from lora_serve.server import throughput
from lora_serve.server.throughput import Throughput, shown, throughput_lines
from tests.fakes.engine import FakeEngine

EARLIER = EngineStats(
    num_steps=10,
    num_computed_tokens=1000,
    num_generated_tokens=200,
    prefix_cache_queries=500,
    prefix_cache_hits=100,
    num_preemptions=1,
)
LATER = EngineStats(
    num_running=3,
    num_waiting=2,
    kv_cache_usage=0.125,
    num_steps=60,
    num_computed_tokens=1500,
    num_generated_tokens=300,
    prefix_cache_queries=700,
    prefix_cache_hits=250,
    num_preemptions=3,
)


class StatsEngine(FakeEngine):
    """Tells the stats that it was given, one after the other, and dies behind them."""

    def __init__(self, *stats: EngineStats) -> None:
        super().__init__()
        self._stats = list(stats)

    async def get_stats(self) -> EngineStats:
        if not self._stats:
            raise EngineDeadError("gone")
        return self._stats.pop(0)


def test_figures_are_of_the_time_since_the_last_look() -> None:
    fields = Throughput(EARLIER, 100.0).fields(LATER, 110.0)
    assert fields == {
        "prompt_throughput": 40.0,
        "generation_throughput": 10.0,
        "running": 3,
        "waiting": 2,
        "preemptions": 2,
        "kv_cache_usage": 0.125,
        "prefix_cache_hit_rate": 0.75,
        "draft_acceptance_rate": None,
    }
    assert shown(fields) == (
        "Avg prompt throughput: 40.0 tokens/s, Avg generation throughput: 10.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, Preemptions: 2, KV cache usage: 12.5%, "
        "Prefix cache hit rate: 75.0%"
    )


def test_nothing_is_told_while_there_is_no_work() -> None:
    assert Throughput(EARLIER, 0.0).fields(EARLIER, 10.0) is None


def test_a_request_that_waits_is_work() -> None:
    fields = Throughput(EngineStats(), 0.0).fields(EngineStats(num_waiting=1), 10.0)
    assert fields is not None
    assert "Waiting: 1 reqs" in shown(fields)
    assert "hit rate: none asked" in shown(fields)


def test_an_engine_that_was_started_again_gives_no_negative_rate() -> None:
    again = EngineStats(num_steps=4, num_computed_tokens=40, num_generated_tokens=10)
    fields = Throughput(LATER, 0.0).fields(again, 10.0)
    assert fields is not None
    assert fields["prompt_throughput"] == 3.0
    assert fields["generation_throughput"] == 1.0


async def test_a_line_comes_at_each_interval_until_the_end_whatever_the_engine_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, throughput.__name__)
    engine = StatsEngine(EngineStats(), EARLIER, LATER)
    async with throughput_lines(engine, LogConfig(log_stats_interval=0.1)):
        await asyncio.sleep(0.6)
    assert [record.getMessage().count("Running") for record in caplog.records] == [1, 1]


async def test_the_lines_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, throughput.__name__)
    engine = StatsEngine(EARLIER, LATER)
    config = LogConfig(log_stats_interval=0.1, disable_log_stats=True)
    async with throughput_lines(engine, config):
        await asyncio.sleep(0.25)
    assert not caplog.records


def test_the_share_of_drafts_that_were_accepted_is_told_where_there_were_any() -> None:
    drafted = replace(LATER, num_draft_tokens=8, num_accepted_tokens=6)
    fields = Throughput(EARLIER, 0.0).fields(drafted, 10.0)
    assert fields is not None
    assert shown(fields).endswith("Avg Draft acceptance rate: 75.0%")
