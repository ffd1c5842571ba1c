"""What an engine tells of itself: gauges and totals, of its KV tiers too, and requests' times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from lora_serve.identity import NoAdapter

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds


class RequestTimes(msgspec.Struct, frozen=True):
    """A finished request's story, for the histograms; seconds of one monotonic clock.

    finish_reason: as the engine knows it; what a stop string ends is "abort" to it, or ends later.
    num_queried_tokens: prompt tokens looked up in the prefix cache; num_cached_tokens were found.
    scheduled and first_token are 0 for a request that never got that far.
    """

    request_id: str
    lora_name: str | NoAdapter
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    max_tokens: int
    arrival: float
    scheduled: float
    first_token: float
    finished: float


@dataclass(frozen=True, slots=True)
class TierContents:
    """What a tier holds, as far as it knows without I/O. capacity_bytes: 0 if not bounded here.

    quarantined: files or records that were refused and set aside since start, by Cause.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0
    num_evicted: int = 0
    quarantined: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFigures:
    """One tier's counters since start; blocks, bytes and seconds.

    misses: blocks that were asked for and not loaded, by Cause: those that a fetch still wanted
        when this tier had no more for it, and one for each record that was refused.
    unsaved: blocks offered and not kept, by Cause.
    load_seconds: duration of each load, as counts of those at most as long as each bound of
        LATENCY_BUCKETS (the last count is for longer ones); load_seconds_sum over all.
    load_breaker, save_breaker: "closed", "open" or "half-open"; a full disk still gives what it
        has. num_trips: how often they opened.
    """

    tier: str
    contents: TierContents
    hits: int
    hit_bytes: int
    misses: Mapping[str, int]
    num_saved: int
    saved_bytes: int
    unsaved: Mapping[str, int]
    load_seconds: tuple[int, ...]
    load_seconds_sum: float
    save_seconds: tuple[int, ...]
    save_seconds_sum: float
    load_breaker: str
    save_breaker: str
    num_trips: int


class StepTotals(msgspec.Struct):
    """What steps did since the engine's start. The scheduler counts it.

    num_drafts: chunks with draft tokens, num_draft_tokens, of which num_accepted_tokens were drawn.
    num_accepted_by_position: how often the first draft token of a chunk was drawn, the second …
    prefix_cache_queries, _hits: prompt tokens, once for each request; external_cache_queries,
        _hits: those that the device cache did not have and the KV tiers were asked for, and gave.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: tuple[int, ...] = ()
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_cache_queries: int = 0
    external_cache_hits: int = 0


class EngineStats(StepTotals):
    """Gauges, and totals since start.

    num_late_fetches: fetches from the KV tiers that ended at their deadline.
    num_kv_event_batches: messages to consumers of KV events; those for which there was no room,
        num_lost_kv_event_batches, among them.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_fetching: int = 0
    num_awaiting_mask: int = 0
    is_paused: bool = False
    kv_cache_usage: float = 0.0
    num_blocks: int = 0
    kv_cache_size_tokens: int = 0
    num_late_fetches: int = 0
    kv_tiers: tuple[TierFigures, ...] = ()
    adapter_loads: int = 0
    adapter_evictions: int = 0
    adapter_load_timeouts: int = 0
    adapter_late_loads: int = 0
    num_kv_event_batches: int = 0
    num_lost_kv_event_batches: int = 0
    num_kv_event_replays: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
