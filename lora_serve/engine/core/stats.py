"""What the engine tells of itself: counts and gauges of the moment, and how far requests are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from lora_serve.adapters.manager import AdapterManager
from lora_serve.engine.core.kv_events import Publisher
from lora_serve.engine_stats import EngineStats
from lora_serve.kv.manager import KVCacheManager
from lora_serve.kv_tiers.base import TierStats
from lora_serve.messages import RequestStanding
from lora_serve.scheduler.request import RequestStatus
from lora_serve.scheduler.scheduler import Scheduler


def engine_stats(
    scheduler: Scheduler,
    adapters: AdapterManager,
    kv: KVCacheManager,
    tiers: TierStats,
    publisher: Publisher | None,
) -> EngineStats:
    """Gauges and totals. publisher: of KV events, if there is one."""
    return EngineStats(
        **msgspec.structs.asdict(scheduler.totals),
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_deferred=scheduler.num_deferred,
        num_fetching=scheduler.num_fetching,
        num_awaiting_mask=scheduler.num_awaiting_mask,
        is_paused=scheduler.is_paused,
        kv_cache_usage=kv.usage,
        num_blocks=kv.num_blocks,
        kv_cache_size_tokens=kv.size_tokens,
        num_late_fetches=tiers.num_late,
        kv_tiers=tiers.tiers,
        adapter_loads=adapters.num_loads,
        adapter_evictions=adapters.num_evictions,
        adapter_load_timeouts=adapters.num_load_timeouts,
        adapter_late_loads=adapters.num_late_loads,
        num_kv_event_batches=publisher.num_batches if publisher else 0,
        num_lost_kv_event_batches=publisher.num_lost if publisher else 0,
        num_kv_event_replays=publisher.num_replays if publisher else 0,
        running_adapters=tuple(ref.name for ref in scheduler.running_adapters),
        waiting_adapters=tuple(ref.name for ref in scheduler.waiting_adapters),
    )


def standings(scheduler: Scheduler, request_ids: Sequence[str]) -> Iterator[RequestStanding]:
    """How far those of the requests are that are here."""
    for request_id in request_ids:
        request = scheduler.get(request_id)
        if request is not None:
            yield RequestStanding(
                request_id,
                is_running=request.status is RequestStatus.RUNNING,
                num_computed_tokens=request.num_computed_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_output_tokens=request.num_output_tokens,
            )
