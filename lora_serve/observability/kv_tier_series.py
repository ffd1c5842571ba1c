"""One engine's KV tiers for Prometheus: series by tier, and by cause where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from lora_serve.engine_stats import LATENCY_BUCKETS, TierFigures

GAUGES: dict[str, tuple[str, Callable[[TierFigures], float]]] = {
    "blocks": (
        "KV blocks that the tier holds, as far as it knows.",
        lambda t: t.contents.num_blocks,
    ),
    "bytes": ("Bytes of them.", lambda t: t.contents.num_bytes),
    "capacity_bytes": (
        "Most bytes it may hold; 0 if not bounded here.",
        lambda t: t.contents.capacity_bytes,
    ),
    "load_breaker_open": ("1 while nothing is read from it.", lambda t: t.load_breaker != "closed"),
    "save_breaker_open": ("1 while nothing is stored in it.", lambda t: t.save_breaker != "closed"),
}

COUNTERS: dict[str, tuple[str, Callable[[TierFigures], float]]] = {
    "hit_blocks": ("KV blocks it gave.", lambda t: t.hits),
    "hit_bytes": ("Bytes of them.", lambda t: t.hit_bytes),
    "saved_blocks": ("KV blocks stored in it.", lambda t: t.num_saved),
    "saved_bytes": ("Bytes of them.", lambda t: t.saved_bytes),
    "evicted_blocks": ("KV blocks evicted to keep to its bound.", lambda t: t.contents.num_evicted),
    "breaker_trips": ("Times it was left alone after failures.", lambda t: t.num_trips),
}

BY_CAUSE: dict[str, tuple[str, Callable[[TierFigures], Mapping[str, int]]]] = {
    "missed_blocks": ("KV blocks it was asked for and did not give.", lambda t: t.misses),
    "unsaved_blocks": ("KV blocks it was offered and did not keep.", lambda t: t.unsaved),
    "quarantined_files": ("What was refused and set aside.", lambda t: t.contents.quarantined),
}

SECONDS: dict[str, tuple[str, Callable[[TierFigures], tuple[Sequence[int], float]]]] = {
    "load_seconds": ("Duration of each load.", lambda t: (t.load_seconds, t.load_seconds_sum)),
    "save_seconds": ("Duration of each save.", lambda t: (t.save_seconds, t.save_seconds_sum)),
}


def kv_tier_series(labels: dict[str, str], tiers: Sequence[TierFigures]) -> Iterator[Metric]:
    """Every family, with a series for each tier."""
    names = (*labels, "tier")
    values = {tier.tier: (*labels.values(), tier.tier) for tier in tiers}
    for key, (help, read) in GAUGES.items():
        gauge = GaugeMetricFamily(f"lora_serve:kv_tier_{key}", help, labels=names)
        for tier in tiers:
            gauge.add_metric(values[tier.tier], float(read(tier)))
        yield gauge
    for key, (help, read) in COUNTERS.items():
        counter = CounterMetricFamily(f"lora_serve:kv_tier_{key}", help, labels=names)
        for tier in tiers:
            counter.add_metric(values[tier.tier], read(tier))
        yield counter
    for key, (help, read_causes) in BY_CAUSE.items():
        causes = CounterMetricFamily(f"lora_serve:kv_tier_{key}", help, labels=(*names, "cause"))
        for tier in tiers:
            for cause, count in read_causes(tier).items():
                causes.add_metric((*values[tier.tier], cause), count)
        yield causes
    for key, (help, read_seconds) in SECONDS.items():
        histogram = HistogramMetricFamily(f"lora_serve:kv_tier_{key}", help, labels=names)
        for tier in tiers:
            counts, total = read_seconds(tier)
            histogram.add_metric(values[tier.tier], _buckets(counts), total)
        yield histogram


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, the last of them without one."""
    names = [*map(str, LATENCY_BUCKETS), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
