"""Histograms over finished requests and steps, under vLLM's names and with its buckets.

All times are seconds. Knows nothing of HTTP: it is fed with what the engine reports.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import Metric

from lora_serve.engine_stats import RequestTimes

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_INTERVAL_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PHASE_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
OLD_TOKEN_INTERVAL = "vllm:time_per_output_token_seconds"
PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


def token_count_buckets(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … up to and including `largest`."""
    buckets: list[float] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > largest:
                return tuple(buckets)
            buckets.append(float(step * power))
        power *= 10


class RequestHistograms:
    """One observation of each for every finished request."""

    def __init__(
        self, registry: CollectorRegistry, labels: dict[str, str], max_model_len: int
    ) -> None:
        def family(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(
                f"vllm:{name}", help, tuple(labels), registry=registry, buckets=buckets
            )

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return family(name, help, buckets).labels(*labels.values())

        sizes = token_count_buckets(max_model_len)
        self._first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS
        )
        self._token_intervals = family(
            "inter_token_latency_seconds", "Between a request's tokens.", TOKEN_INTERVAL_SECONDS
        )
        self._token_interval = self._token_intervals.labels(*labels.values())
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time between tokens.",
            TOKEN_INTERVAL_SECONDS,
        )
        self._latency = histogram("e2e_request_latency_seconds", "Arrival to end.", PHASE_SECONDS)
        self._queue = histogram(
            "request_queue_time_seconds", "Arrival to first step.", PHASE_SECONDS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "First step to first token.", PHASE_SECONDS
        )
        self._decode = histogram(
            "request_decode_time_seconds", "First token to end.", PHASE_SECONDS
        )
        self._inference = histogram(
            "request_inference_time_seconds", "First step to end.", PHASE_SECONDS
        )
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens.", sizes)
        self._output_tokens = histogram("request_generation_tokens", "Generated tokens.", sizes)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens asked for.", sizes)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in a cache.", sizes
        )
        self._preemptions = histogram(
            "request_num_preemptions", "How often a request was preempted.", PREEMPTIONS
        )
        self._step_tokens = histogram(
            "iteration_tokens_total",
            "Prompt tokens computed and tokens generated in a step.",
            STEP_TOKENS,
        )

    def token_intervals_by_old_name(self) -> Metric:
        """The time between tokens under the name that vLLM gave it before."""
        (now,) = self._token_intervals.collect()
        old = Metric(OLD_TOKEN_INTERVAL, now.documentation, now.type)
        for sample in now.samples:
            old.samples.append(
                sample._replace(name=OLD_TOKEN_INTERVAL + sample.name[len(now.name) :])
            )
        return old

    def observe_step(self, num_tokens: int) -> None:
        self._step_tokens.observe(num_tokens)

    def observe_token_interval(self, seconds: float) -> None:
        self._token_interval.observe(seconds)

    def observe_finished(self, times: RequestTimes) -> None:
        self._latency.observe(times.finished - times.arrival)
        self._prompt_tokens.observe(times.num_prompt_tokens)
        self._output_tokens.observe(times.num_output_tokens)
        self._max_tokens.observe(times.max_tokens)
        self._preemptions.observe(times.num_preemptions)
        if times.scheduled:
            self._queue.observe(times.scheduled - times.arrival)
            self._inference.observe(times.finished - times.scheduled)
            self._computed.observe(times.num_prompt_tokens - times.num_cached_tokens)
        if times.first_token:
            self._first_token.observe(times.first_token - times.arrival)
            self._prefill.observe(times.first_token - times.scheduled)
            self._decode.observe(times.finished - times.first_token)
        if times.num_output_tokens > 1:
            decode_seconds = times.finished - times.first_token
            self._per_token.observe(decode_seconds / (times.num_output_tokens - 1))
