"""The line of throughput that the log has now and then, while there is work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping

from lora_serve.config import LogConfig
from lora_serve.engine_stats import EngineStats
from lora_serve.errors import LoraServeError
from lora_serve.observability.log import with_fields
from lora_serve.server.engine_api import Engine

logger = logging.getLogger(__name__)

ENGINE_SECONDS = 2.0  # in which the engine must tell its gauges

Fields = Mapping[str, float | None]


class Throughput:
    """What was done between two looks at an engine's totals. seconds: of one monotonic clock."""

    def __init__(self, stats: EngineStats, seconds: float) -> None:
        self._last, self._seconds = stats, seconds

    def fields(self, stats: EngineStats, seconds: float) -> Fields | None:
        """The figures since the last look; None if nothing was done and nothing is to be done.

        Rates are tokens a second. Prompt tokens are those that were computed: no cached ones.
        """
        last, past = self._last, seconds - self._seconds
        self._last, self._seconds = stats, seconds
        if stats.num_steps < last.num_steps:  # an engine that was started again counts from 0
            last = EngineStats()
        computed = stats.num_computed_tokens - last.num_computed_tokens
        generated = stats.num_generated_tokens - last.num_generated_tokens
        queried = stats.prefix_cache_queries - last.prefix_cache_queries
        drafted = stats.num_draft_tokens - last.num_draft_tokens
        accepted = stats.num_accepted_tokens - last.num_accepted_tokens
        hits = stats.prefix_cache_hits - last.prefix_cache_hits
        if not (computed or stats.num_running or stats.num_waiting):
            return None
        return {
            "prompt_throughput": round(max(0, computed - generated) / past, 1),
            "generation_throughput": round(generated / past, 1),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "preemptions": stats.num_preemptions - last.num_preemptions,
            "kv_cache_usage": round(stats.kv_cache_usage, 4),
            "prefix_cache_hit_rate": round(hits / queried, 4) if queried else None,
            "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        }


def shown(fields: Fields) -> str:
    """The line for readers, in vLLM's words."""
    hit_rate, acceptance = fields["prefix_cache_hit_rate"], fields["draft_acceptance_rate"]
    drafts = "" if acceptance is None else f", Avg Draft acceptance rate: {acceptance:.1%}"
    preemptions = f"Preemptions: {fields['preemptions']}, " if fields["preemptions"] else ""
    return (
        f"Avg prompt throughput: {fields['prompt_throughput']} tokens/s, "
        f"Avg generation throughput: {fields['generation_throughput']} tokens/s, "
        f"Running: {fields['running']} reqs, Waiting: {fields['waiting']} reqs, {preemptions}"
        f"KV cache usage: {fields['kv_cache_usage']:.1%}, "
        f"Prefix cache hit rate: {'none asked' if hit_rate is None else f'{hit_rate:.1%}'}{drafts}"
    )


@contextlib.asynccontextmanager
async def throughput_lines(engine: Engine, config: LogConfig) -> AsyncIterator[None]:
    """Write a line every --log-stats-interval meanwhile, unless --disable-log-stats."""
    if config.disable_log_stats or not logger.isEnabledFor(logging.INFO):
        yield
        return
    task = asyncio.create_task(_tell(engine, config.log_stats_interval), name="throughput")
    try:
        yield
    finally:
        task.cancel()


async def _tell(engine: Engine, interval: float) -> None:
    throughput = Throughput(EngineStats(), time.monotonic())
    while True:
        await asyncio.sleep(interval)
        # A busy or dead engine tells nothing; the next line is of a longer time.
        with contextlib.suppress(LoraServeError, TimeoutError):
            async with asyncio.timeout(ENGINE_SECONDS):
                stats = await engine.get_stats()
            fields = throughput.fields(stats, time.monotonic())
            if fields is not None:
                logger.info("%s", shown(fields), extra=with_fields(**fields))
