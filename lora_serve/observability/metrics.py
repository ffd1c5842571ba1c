"""One engine's metrics for Prometheus: vLLM's names, plus series for each adapter.

A step costs its histograms; everything else is made for a scrape.
Each engine has its own registry, so two fit in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lora_serve.config import EngineConfig
from lora_serve.engine_stats import EngineStats, RequestTimes
from lora_serve.identity import BASE_MODEL
from lora_serve.messages import AdapterInfo, StepOutputs
from lora_serve.observability.adapter_series import (
    AdapterCounter,
    adapter_gauges,
    lora_requests_info,
)
from lora_serve.observability.histograms import RequestHistograms
from lora_serve.observability.intervals import TokenIntervals
from lora_serve.observability.kv_tier_series import kv_tier_series

FINISH_REASONS = ("stop", "length", "abort", "error")
LARGEST_PROMPT = 1_000_000  # end of the size buckets when the config does not limit the length

GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_running": ("Requests in the running batch.", lambda s: s.num_running),
    "vllm:num_requests_waiting": ("Requests that wait to run.", lambda s: s.num_waiting),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", lambda s: s.kv_cache_usage),
    "lora_serve:num_requests_deferred": (
        "Waiting requests whose next block another request is computing.",
        lambda s: s.num_deferred,
    ),
    "lora_serve:num_requests_fetching": (
        "Waiting requests for which KV is being fetched from the tiers.",
        lambda s: s.num_fetching,
    ),
    "lora_serve:is_paused": ("1 between /pause and /resume.", lambda s: s.is_paused),
}

COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_cache_queries,
    ),
    "vllm:prefix_cache_hits": (
        "Prompt tokens found in the prefix cache.",
        lambda s: s.prefix_cache_hits,
    ),
    "vllm:external_prefix_cache_queries": (
        "Prompt tokens that the device cache did not have, looked up in the KV tiers.",
        lambda s: s.external_cache_queries,
    ),
    "vllm:external_prefix_cache_hits": (
        "Prompt tokens found in the KV tiers.",
        lambda s: s.external_cache_hits,
    ),
    "lora_serve:kv_fetches_late": (
        "Fetches from the KV tiers that ended at their deadline.",
        lambda s: s.num_late_fetches,
    ),
    "vllm:generation_tokens": ("Tokens generated.", lambda s: s.num_generated_tokens),
    "vllm:num_preemptions": ("Requests preempted.", lambda s: s.num_preemptions),
    "lora_serve:steps": ("Steps run.", lambda s: s.num_steps),
    "lora_serve:computed_tokens": (
        "Tokens computed, of prompts and answers.",
        lambda s: s.num_computed_tokens,
    ),
    "lora_serve:adapter_loads": (
        "Adapters read into memory, anew or again after an eviction.",
        lambda s: s.adapter_loads,
    ),
    "lora_serve:adapter_evictions": (
        "Adapters evicted from memory.",
        lambda s: s.adapter_evictions,
    ),
    "lora_serve:adapter_load_timeouts": (
        "Reads of adapters that were given up at their deadline.",
        lambda s: s.adapter_load_timeouts,
    ),
    "lora_serve:adapter_late_loads": (
        "Reads of adapters that ended after they had been given up, and were thrown away.",
        lambda s: s.adapter_late_loads,
    ),
    "lora_serve:kv_event_batches": (
        "Messages of KV events, lost ones among them.",
        lambda s: s.num_kv_event_batches,
    ),
    "lora_serve:kv_event_batches_lost": (
        "Messages of KV events for which there was no room; consumers are told everything anew.",
        lambda s: s.num_lost_kv_event_batches,
    ),
    "lora_serve:kv_event_replays": (
        "Times a consumer asked for KV events that it had missed.",
        lambda s: s.num_kv_event_replays,
    ),
}


DRAFT_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:spec_decode_num_drafts": ("Drafts verified.", lambda s: s.num_drafts),
    "vllm:spec_decode_num_draft_tokens": (
        "Draft tokens verified.",
        lambda s: s.num_draft_tokens,
    ),
    "vllm:spec_decode_num_accepted_tokens": (
        "Draft tokens that were drawn, too.",
        lambda s: s.num_accepted_tokens,
    ),
}


@dataclass(frozen=True, slots=True)
class CatalogFigures:
    """What a server makes of the adapter catalog. num_names: by their states here."""

    is_up: bool
    serial: int
    num_names: Mapping[str, int]


class EngineMetrics(Collector):
    """One engine's metrics. `observe` takes what every step sends; `render` answers a scrape."""

    def __init__(
        self,
        model_name: str,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config or EngineConfig()
        self._clock = clock
        self._labels = {"model_name": model_name, "engine": "0"}
        self._stats = EngineStats()
        self._adapters: Sequence[AdapterInfo] = ()
        self._prompt_tokens = 0
        self._num_stale_scrapes = 0
        self._num_restarts = 0
        self._refused: Mapping[str, int] = {}
        self._catalog: Callable[[], CatalogFigures] | None = None
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._adapter_requests = AdapterCounter()
        self._adapter_queries = AdapterCounter()
        self._adapter_hits = AdapterCounter()
        self._intervals = TokenIntervals()
        self.registry = CollectorRegistry()
        self._histograms = RequestHistograms(
            self.registry, self._labels, self._config.model.max_model_len or LARGEST_PROMPT
        )
        self.registry.register(self)

    def observe(self, outputs: StepOutputs) -> None:
        """Take in one step."""
        if outputs.step_num_tokens:
            self._histograms.observe_step(outputs.step_num_tokens)
        for seconds in self._intervals.observe(outputs.outputs, self._clock()):
            self._histograms.observe_token_interval(seconds)
        for times in outputs.finished:
            self._observe_finished(times)

    def observe_stats(self, stats: EngineStats) -> None:
        """Take in the engine's gauges and totals; the server asks before it renders."""
        self._stats = stats

    def observe_adapters(self, adapters: Sequence[AdapterInfo]) -> None:
        """Take in which adapters are registered; the server asks for them, too."""
        self._adapters = adapters

    def count_stale_scrape(self) -> None:
        """Count a scrape for which the engine did not answer in time: its gauges are older."""
        self._num_stale_scrapes += 1

    def count_restart(self) -> None:
        """Count an engine process that has taken the place of one that died."""
        self._num_restarts += 1

    def watch_refusals(self, refused: Mapping[str, int]) -> None:
        """Show this count of refused requests, by the limit that they exceeded."""
        self._refused = refused

    def watch_catalog(self, figures: Callable[[], CatalogFigures]) -> None:
        """Show what this server makes of the adapter catalog."""
        self._catalog = figures

    def render(self) -> bytes:
        """Write the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Give the registry everything but the histograms."""
        for name, (help, read) in GAUGES.items():
            yield self._gauge(name, help, read(self._stats))
        for name, (help, read) in COUNTERS.items():
            yield self._counter(name, help, [({}, read(self._stats))])
        yield from self._draft_counters()
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens of finished requests.", [({}, self._prompt_tokens)]
        )
        yield self._counter(
            "lora_serve:stale_scrapes",
            "Scrapes that show gauges of an earlier moment.",
            [({}, self._num_stale_scrapes)],
        )
        yield self._counter(
            "lora_serve:engine_restarts",
            "Engine processes started in place of one that died.",
            [({}, self._num_restarts)],
        )
        yield self._counter(
            "vllm:admission_rejections",
            "Requests refused because too much waited, by the limit.",
            [({"reason": reason}, n) for reason, n in self._refused.items()],
        )
        yield self._counter(
            "vllm:request_success",
            "Finished requests, by the reason.",
            [({"finished_reason": reason}, n) for reason, n in self._finished.items()],
        )
        yield self._waiting_by_reason()
        yield lora_requests_info(self._config.lora.cpu_lora_limit, self._stats, self._adapters)
        yield self._cache_config_info()
        yield from self._adapter_counters()
        yield from adapter_gauges(self._labels, self._adapters)
        if self._catalog is not None:
            yield from self._catalog_gauges(self._catalog())
        if self._stats.kv_tiers:
            yield from kv_tier_series(self._labels, self._stats.kv_tiers)
        yield from self._old_names()

    def _old_names(self) -> Iterator[Metric]:
        """Series again under the names that vLLM gave them before, which gateways still read."""
        kv_cache = GAUGES["vllm:kv_cache_usage_perc"]
        yield self._gauge("vllm:gpu_cache_usage_perc", kv_cache[0], kv_cache[1](self._stats))
        for name in ("prefix_cache_queries", "prefix_cache_hits"):
            help, read = COUNTERS[f"vllm:{name}"]
            yield self._counter(f"vllm:gpu_{name}", help, [({}, read(self._stats))])
        yield self._histograms.token_intervals_by_old_name()

    def _draft_counters(self) -> Iterator[CounterMetricFamily]:
        """What became of drafts, where there may be any."""
        num_positions = self._config.speculative.max_drafts
        if not num_positions:
            return
        for name, (help, read) in DRAFT_COUNTERS.items():
            yield self._counter(name, help, [({}, read(self._stats))])
        counts = self._stats.num_accepted_by_position
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in their draft.",
            [
                ({"position": str(i)}, counts[i] if i < len(counts) else 0)
                for i in range(num_positions)
            ],
        )

    def _observe_finished(self, times: RequestTimes) -> None:
        self._histograms.observe_finished(times)
        self._prompt_tokens += times.num_prompt_tokens
        self._finished[times.finish_reason] = self._finished.get(times.finish_reason, 0) + 1
        if times.lora_name is not BASE_MODEL:
            self._adapter_requests.add(times.lora_name, 1)
            self._adapter_queries.add(times.lora_name, times.num_queried_tokens)
            self._adapter_hits.add(times.lora_name, times.num_cached_tokens)

    def _gauge(
        self, name: str, help: str, value: float, labels: dict[str, str] | None = None
    ) -> GaugeMetricFamily:
        all_labels = self._labels | (labels or {})
        family = GaugeMetricFamily(name, help, labels=tuple(all_labels))
        family.add_metric(tuple(all_labels.values()), value)
        return family

    def _counter(
        self, name: str, help: str, samples: Iterable[tuple[dict[str, str], float]]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help, labels=())
        for labels, value in samples:
            family.add_sample(f"{name}_total", self._labels | labels, value)
        return family

    def _catalog_gauges(self, figures: CatalogFigures) -> Iterator[GaugeMetricFamily]:
        yield self._gauge(
            "lora_serve:catalog_is_up", "1 if the adapter catalog answers.", figures.is_up
        )
        yield self._gauge(
            "lora_serve:catalog_serial",
            "Serial of the last change of the adapter catalog that is known here.",
            figures.serial,
        )
        names = GaugeMetricFamily(
            "lora_serve:catalog_names",
            "Names of the adapter catalog, by how they stand here.",
            labels=(*self._labels, "state"),
        )
        for state, count in figures.num_names.items():
            names.add_metric((*self._labels.values(), state), count)
        yield names

    def _waiting_by_reason(self) -> GaugeMetricFamily:
        """Requests that wait for room, for KV that others compute or fetch, and for a grammar."""
        stats = self._stats
        num_deferred = stats.num_deferred + stats.num_fetching
        labels = (*self._labels, "reason")
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests that wait to run.", labels=labels
        )
        for reason, count in (
            ("capacity", stats.num_waiting - num_deferred - stats.num_awaiting_mask),
            ("deferred", num_deferred),
            ("grammar", stats.num_awaiting_mask),
        ):
            family.add_metric((*self._labels.values(), reason), count)
        return family

    def _cache_config_info(self) -> GaugeMetricFamily:
        cache = self._config.cache
        return self._gauge(
            "vllm:cache_config_info",
            "Settings of the KV cache, as labels.",
            1,
            {
                "block_size": str(cache.block_size),
                "num_gpu_blocks": str(self._stats.num_blocks),
                "kv_cache_size_tokens": str(self._stats.kv_cache_size_tokens),
                "gpu_memory_utilization": str(cache.gpu_memory_utilization),
                "enable_prefix_caching": str(cache.enable_prefix_caching),
                "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
            },
        )

    def _adapter_counters(self) -> Iterator[CounterMetricFamily]:
        for name, help, counter in (
            ("adapter_requests", "Finished requests.", self._adapter_requests),
            ("adapter_prefix_cache_queries", "Prompt tokens looked up.", self._adapter_queries),
            ("adapter_prefix_cache_hits", "Prompt tokens found in the cache.", self._adapter_hits),
        ):
            samples = [({"lora_name": key}, n) for key, n in counter.totals().items()]
            yield self._counter(f"lora_serve:{name}", f"{help} By adapter.", samples)
