from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from lora_serve.engine_stats import EngineStats, TierContents, TierFigures
from lora_serve.observability.metrics import EngineMetrics


def figures(tier: str, num_blocks: int = 0) -> TierFigures:
    return TierFigures(
        tier=tier,
        contents=TierContents(num_blocks=num_blocks),
        hits=3,
        hit_bytes=300,
        misses={"absent": 2},
        num_saved=num_blocks,
        saved_bytes=100 * num_blocks,
        unsaved={"queue_full": 1},
        load_seconds=(1, 2, *([0] * 10)),
        load_seconds_sum=0.5,
        save_seconds=(0, 1, *([0] * 10)),
        save_seconds_sum=0.25,
        load_breaker="closed",
        save_breaker="open",
        num_trips=1,
    )


def samples(stats: EngineStats) -> dict[tuple[str, str, str], float]:
    """Samples by name, tier, and cause or bucket."""
    metrics = EngineMetrics("tiny")
    metrics.observe_stats(stats)
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = sample.labels
            extra = labels.get("cause", labels.get("le", ""))
            found[sample.name, labels.get("tier", ""), extra] = sample.value
    return found


def test_each_tier_has_its_series() -> None:
    found = samples(EngineStats(kv_tiers=tuple(map(figures, ("ram", "disk")))))
    prefix = "lora_serve:kv_tier_"
    for tier in ("ram", "disk"):
        assert found[f"{prefix}hit_blocks_total", tier, ""] == 3
        assert found[f"{prefix}missed_blocks_total", tier, "absent"] == 2
        assert found[f"{prefix}unsaved_blocks_total", tier, "queue_full"] == 1
        assert found[f"{prefix}save_breaker_open", tier, ""] == 1
        assert found[f"{prefix}load_breaker_open", tier, ""] == 0
        assert found[f"{prefix}load_seconds_bucket", tier, "0.0025"] == 3
        assert found[f"{prefix}load_seconds_bucket", tier, "+Inf"] == 3
        assert found[f"{prefix}load_seconds_sum", tier, ""] == 0.5


def test_what_tiers_gave_stands_under_vllms_names() -> None:
    found = samples(EngineStats(external_cache_queries=20, external_cache_hits=16, num_fetching=2))
    assert found["vllm:external_prefix_cache_queries_total", "", ""] == 20
    assert found["vllm:external_prefix_cache_hits_total", "", ""] == 16
    assert found["lora_serve:num_requests_fetching", "", ""] == 2
    assert not any(name.startswith("lora_serve:kv_tier_") for name, _, _ in found)
