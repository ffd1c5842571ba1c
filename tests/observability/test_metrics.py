from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from lora_serve.config import EngineConfig, LoRAConfig, ModelConfig, SpeculativeConfig
from lora_serve.engine_stats import EngineStats, RequestTimes
from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.messages import AdapterInfo, EngineOutput, ErrorInfo, StepOutputs
from lora_serve.observability.adapter_series import MAX_SERIES
from lora_serve.observability.metrics import EngineMetrics


def times(
    lora_name: str | NoAdapter = BASE_MODEL,
    *,
    finish_reason: str = "stop",
    scheduled: float = 11.0,
    first_token: float = 13.0,
    num_output_tokens: int = 5,
) -> RequestTimes:
    return RequestTimes(
        request_id="r",
        lora_name=lora_name,
        finish_reason=finish_reason,
        num_prompt_tokens=100,
        num_output_tokens=num_output_tokens,
        num_queried_tokens=100,
        num_cached_tokens=64,
        num_preemptions=1,
        max_tokens=16,
        arrival=10.0,
        scheduled=scheduled,
        first_token=first_token,
        finished=21.0,
    )


def samples(metrics: EngineMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Values by name and by those labels that are not the same everywhere."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def test_gauges_and_totals_are_those_of_the_last_step() -> None:
    metrics = EngineMetrics("tiny")
    metrics.observe_stats(EngineStats(num_running=9))
    stats = EngineStats(
        num_running=2,
        num_waiting=3,
        kv_cache_usage=0.25,
        num_preemptions=4,
        num_generated_tokens=50,
        prefix_cache_queries=200,
        prefix_cache_hits=160,
        adapter_loads=6,
        adapter_evictions=1,
    )
    metrics.observe_stats(stats)
    metrics.observe(StepOutputs(outputs=()))

    found = samples(metrics)
    assert found["vllm:num_requests_running", ()] == 2
    assert found["vllm:num_requests_waiting", ()] == 3
    assert found["vllm:kv_cache_usage_perc", ()] == 0.25
    assert found["vllm:num_preemptions_total", ()] == 4
    assert found["vllm:generation_tokens_total", ()] == 50
    assert found["vllm:prefix_cache_queries_total", ()] == 200
    assert found["vllm:prefix_cache_hits_total", ()] == 160
    assert found["lora_serve:adapter_loads_total", ()] == 6
    assert found["lora_serve:adapter_evictions_total", ()] == 1


def test_waiting_requests_are_told_by_what_they_wait_for() -> None:
    metrics = EngineMetrics("tiny")
    stats = EngineStats(
        num_waiting=9,
        num_deferred=2,
        num_fetching=1,
        num_awaiting_mask=2,
        kv_cache_size_tokens=512,
    )
    metrics.observe_stats(stats)
    found = samples(metrics)
    waiting = "vllm:num_requests_waiting_by_reason"
    assert found[waiting, (("reason", "capacity"),)] == 4
    assert found[waiting, (("reason", "deferred"),)] == 3
    assert found[waiting, (("reason", "grammar"),)] == 2
    (labels,) = (dict(labels) for name, labels in found if name == "vllm:cache_config_info")
    assert labels["kv_cache_size_tokens"] == "512"


def test_every_series_of_the_engine_names_model_and_engine() -> None:
    metrics = EngineMetrics("tiny")
    metrics.observe(StepOutputs(outputs=(), finished=(times("a"),)))
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if family.name != "vllm:lora_requests_info":
                assert sample.labels["model_name"] == "tiny"
                assert sample.labels["engine"] == "0"


def test_a_finished_request_is_seen_in_every_histogram_of_its_phases() -> None:
    metrics = EngineMetrics("tiny")
    metrics.observe(StepOutputs(outputs=(), finished=(times(),), step_num_tokens=7))

    found = samples(metrics)
    sums = {name.removeprefix("vllm:"): v for (name, labels), v in found.items() if not labels}
    assert sums["time_to_first_token_seconds_sum"] == 3.0
    assert sums["request_queue_time_seconds_sum"] == 1.0
    assert sums["request_prefill_time_seconds_sum"] == 2.0
    assert sums["request_decode_time_seconds_sum"] == 8.0
    assert sums["request_inference_time_seconds_sum"] == 10.0
    assert sums["e2e_request_latency_seconds_sum"] == 11.0
    assert sums["request_time_per_output_token_seconds_sum"] == 2.0
    assert sums["request_prompt_tokens_sum"] == 100
    assert sums["request_generation_tokens_sum"] == 5
    assert sums["request_params_max_tokens_sum"] == 16
    assert sums["request_prefill_kv_computed_tokens_sum"] == 36
    assert sums["request_num_preemptions_sum"] == 1
    assert sums["iteration_tokens_total_sum"] == 7
    assert sums["prompt_tokens_total"] == 100


def test_a_request_that_never_ran_has_only_a_latency() -> None:
    metrics = EngineMetrics("tiny")
    never = times(finish_reason="abort", scheduled=0.0, first_token=0.0, num_output_tokens=0)
    metrics.observe(StepOutputs(outputs=(), finished=(never,)))
    found = samples(metrics)
    assert found["vllm:e2e_request_latency_seconds_count", ()] == 1
    assert found["vllm:request_queue_time_seconds_count", ()] == 0
    assert found["vllm:time_to_first_token_seconds_count", ()] == 0
    assert found["vllm:request_time_per_output_token_seconds_count", ()] == 0


def test_finished_requests_are_counted_by_reason_and_all_reasons_are_there_from_the_start() -> None:
    metrics = EngineMetrics("tiny")
    metrics.observe(StepOutputs(outputs=(), finished=(times(), times(finish_reason="length"))))
    found = samples(metrics)
    by_reason = {
        reason: found["vllm:request_success_total", (("finished_reason", reason),)]
        for reason in ("stop", "length", "abort", "error")
    }
    assert by_reason == {"stop": 1, "length": 1, "abort": 0, "error": 0}


def test_time_between_tokens_is_measured_from_step_to_step() -> None:
    now = iter([1.0, 1.5, 3.5])
    metrics = EngineMetrics("tiny", clock=lambda: next(now))
    for finish_reason in (None, None, "stop"):
        output = EngineOutput("r", new_token_ids=(1,), finish_reason=finish_reason)
        metrics.observe(StepOutputs(outputs=(output,)))
    found = samples(metrics)
    assert found["vllm:inter_token_latency_seconds_count", ()] == 2
    assert found["vllm:inter_token_latency_seconds_sum", ()] == 2.5


def test_a_failed_request_is_forgotten() -> None:
    now = iter([1.0, 2.0, 9.0])
    metrics = EngineMetrics("tiny", clock=lambda: next(now))
    metrics.observe(StepOutputs(outputs=(EngineOutput("r", new_token_ids=(1,)),)))
    failed = EngineOutput("r", error=ErrorInfo("EngineDeadError", "gone"))
    metrics.observe(StepOutputs(outputs=(failed,)))
    metrics.observe(StepOutputs(outputs=(EngineOutput("r", new_token_ids=(1,)),)))
    assert samples(metrics)["vllm:inter_token_latency_seconds_count", ()] == 0


def test_adapters_have_their_own_hit_and_request_counts() -> None:
    metrics = EngineMetrics("tiny")
    metrics.observe(StepOutputs(outputs=(), finished=(times("a"), times("a"), times("b"))))
    found = samples(metrics)
    a = (("lora_name", "a"),)
    assert found["lora_serve:adapter_prefix_cache_queries_total", a] == 200
    assert found["lora_serve:adapter_prefix_cache_hits_total", a] == 128
    assert found["lora_serve:adapter_requests_total", a] == 2
    assert found["lora_serve:adapter_prefix_cache_queries_total", (("lora_name", "b"),)] == 100


def test_adapters_in_use_are_one_series_and_not_one_for_each_combination() -> None:
    metrics = EngineMetrics("tiny", EngineConfig(lora=LoRAConfig(enable_lora=True, max_loras=3)))
    for running in (("a",), ("a", "b")):
        stats = EngineStats(running_adapters=running, waiting_adapters=("c",))
        metrics.observe_stats(stats)
    labels = [dict(key[1]) for key in samples(metrics) if key[0] == "vllm:lora_requests_info"]
    assert labels == [
        {"max_lora": "24", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    ]


def test_adapters_on_the_device_are_named_though_no_request_of_theirs_runs() -> None:
    config = EngineConfig(lora=LoRAConfig(enable_lora=True, max_loras=1, max_cpu_loras=5))
    metrics = EngineMetrics("tiny", config)
    names = ("idle", "of,two", "evicted", "runs")
    metrics.observe_adapters(
        [
            AdapterInfo(name, "/a", "ab" * 32, 0, 8, 10, residency, False, 0, 1.0)
            for name in names
            for residency in ("evicted" if name == "evicted" else "resident",)
        ]
    )
    stats = EngineStats(running_adapters=("runs",), waiting_adapters=("of,two", "c"))
    metrics.observe_stats(stats)
    (labels,) = [dict(key[1]) for key in samples(metrics) if key[0] == "vllm:lora_requests_info"]
    assert labels == {
        "max_lora": "5",
        "running_lora_adapters": "runs,idle",
        "waiting_lora_adapters": "c",
    }


def test_series_are_found_by_the_names_that_vllm_had_for_them_too() -> None:
    metrics = EngineMetrics("tiny")
    stats = EngineStats(kv_cache_usage=0.25, prefix_cache_queries=8, prefix_cache_hits=6)
    metrics.observe_stats(stats)
    metrics._histograms.observe_token_interval(0.03)
    found = samples(metrics)
    for old, now in (
        ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        ("gpu_prefix_cache_queries_total", "prefix_cache_queries_total"),
        ("gpu_prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("time_per_output_token_seconds_sum", "inter_token_latency_seconds_sum"),
        ("time_per_output_token_seconds_count", "inter_token_latency_seconds_count"),
    ):
        assert found[f"vllm:{old}", ()] == found[f"vllm:{now}", ()] > 0
    buckets = [key for key in found if key[0] == "vllm:time_per_output_token_seconds_bucket"]
    assert sum(found[key] for key in buckets) == sum(
        found["vllm:inter_token_latency_seconds_bucket", labels] for _, labels in buckets
    )


def test_residency_is_shown_for_registered_adapters_only() -> None:
    metrics = EngineMetrics("tiny")
    adapter = AdapterInfo(
        name="a",
        path="/a",
        digest="ab" * 32,
        generation=2,
        rank=16,
        num_bytes=1000,
        residency="evicted",
        pinned=True,
        num_leases=0,
        created=1.0,
    )
    metrics.observe_adapters([adapter])
    found = samples(metrics)
    (labels,) = [dict(key[1]) for key in found if key[0] == "lora_serve:adapter_resident"]
    assert labels == {
        "lora_name": "a",
        "digest": "ab" * 32,
        "generation": "2",
        "rank": "16",
        "pinned": "true",
    }
    assert found["lora_serve:adapter_resident", tuple(sorted(labels.items()))] == 0
    assert found["lora_serve:adapter_size_bytes", (("lora_name", "a"),)] == 1000
    metrics.observe_adapters([])
    assert not [key for key in samples(metrics) if key[0] == "lora_serve:adapter_resident"]


def test_there_are_at_most_so_many_series_of_adapters() -> None:
    metrics = EngineMetrics("tiny")
    names = [f"tenant-{i}" for i in range(5000)]
    metrics.observe_adapters(
        [
            AdapterInfo(name, "/a", "ab" * 32, 0, 8, 10, "evicted" if i % 2 else "resident", False,
                        0, 1.0)
            for i, name in enumerate(names)
        ]
    )  # fmt: skip
    stats = EngineStats(running_adapters=tuple(names[:8]), waiting_adapters=tuple(names))
    finished = tuple(times(name) for name in names)
    metrics.observe_stats(stats)
    metrics.observe(StepOutputs(outputs=(), finished=finished))
    found = samples(metrics)
    by_family: dict[str, list[dict[str, str]]] = {}
    for name, labels in found:
        by_family.setdefault(name, []).append(dict(labels))
    for family in ("resident", "size_bytes", "requests_total", "prefix_cache_hits_total"):
        labelled = by_family[f"lora_serve:adapter_{family}"]
        assert len(labelled) == MAX_SERIES + 1, family
        assert sum(labels["lora_name"] == "other" for labels in labelled) == 1
    resident = {
        dict(labels)["lora_name"]: value
        for (name, labels), value in found.items()
        if name == "lora_serve:adapter_resident"
    }
    assert sum(resident.values()) == 2500
    assert resident["other"] == 2500 - MAX_SERIES
    assert found["lora_serve:adapter_size_bytes", (("lora_name", "other"),)] == 10 * 4744
    (info,) = by_family["vllm:lora_requests_info"]
    assert len(info["waiting_lora_adapters"].split(",")) == MAX_SERIES
    assert len(metrics.render()) < 2**20


def test_cache_settings_are_labels() -> None:
    metrics = EngineMetrics("tiny")
    metrics.observe_stats(EngineStats(num_blocks=77))
    (labels,) = [dict(key[1]) for key in samples(metrics) if key[0] == "vllm:cache_config_info"]
    assert labels["num_gpu_blocks"] == "77"
    assert labels["block_size"] == "16"
    assert labels["enable_prefix_caching"] == "True"


def test_size_buckets_end_at_the_longest_request() -> None:
    metrics = EngineMetrics("tiny", EngineConfig(model=ModelConfig(max_model_len=600)))
    bounds = [
        float(dict(key[1])["le"])
        for key in samples(metrics)
        if key[0] == "vllm:request_prompt_tokens_bucket"
    ]
    assert sorted(bounds) == [1, 2, 5, 10, 20, 50, 100, 200, 500, float("inf")]


def test_two_engines_fit_in_one_process() -> None:
    one, other = EngineMetrics("tiny"), EngineMetrics("tiny")
    one.observe_stats(EngineStats(num_running=1))
    assert samples(one)["vllm:num_requests_running", ()] == 1
    assert samples(other)["vllm:num_requests_running", ()] == 0


def test_drafts_are_counted_by_their_places_where_there_may_be_any() -> None:
    speculative = SpeculativeConfig(
        speculative_method="suffix", speculative_num_speculative_tokens=3
    )
    metrics = EngineMetrics("tiny", EngineConfig(speculative=speculative))
    stats = EngineStats(
        num_drafts=5, num_draft_tokens=9, num_accepted_tokens=4, num_accepted_by_position=(3, 1)
    )
    metrics.observe_stats(stats)
    found = samples(metrics)
    assert found["vllm:spec_decode_num_drafts_total", ()] == 5
    assert found["vllm:spec_decode_num_draft_tokens_total", ()] == 9
    assert found["vllm:spec_decode_num_accepted_tokens_total", ()] == 4
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[name, (("position", str(i)),)] for i in range(3)] == [3, 1, 0]
    assert (name, (("position", "14"),)) in found  # tokens that a grammar forces fill all rows
    off = EngineMetrics("tiny", EngineConfig(speculative=SpeculativeConfig(speculation="off")))
    assert not any("spec_decode" in name for name, _ in samples(off))
