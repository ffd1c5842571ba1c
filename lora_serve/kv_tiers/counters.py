"""Counts what happens to one tier: blocks, bytes, causes and times. Thread-safe."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from lora_serve.engine_stats import LATENCY_BUCKETS, TierContents, TierFigures
from lora_serve.kv_tiers.base import Cause, Record
from lora_serve.kv_tiers.breaker import Breaker


class _Times:
    """Durations, as counts by bucket and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self.sum_seconds += seconds


class TierCounters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits = 0
        self._hit_bytes = 0
        self._misses: Counter[str] = Counter()
        self._num_saved = 0
        self._saved_bytes = 0
        self._unsaved: Counter[str] = Counter()
        self._loads = _Times()
        self._saves = _Times()

    def hit(self, records: Sequence[Record]) -> None:
        with self._lock:
            self._hits += len(records)
            self._hit_bytes += sum(len(record.payload) for record in records)

    def miss(self, cause: Cause, num_blocks: int = 1) -> None:
        with self._lock:
            self._misses[cause.value] += num_blocks

    def saved(self, num_blocks: int, block_bytes: int) -> None:
        with self._lock:
            self._num_saved += num_blocks
            self._saved_bytes += num_blocks * block_bytes

    def unsaved(self, cause: Cause, num_blocks: int) -> None:
        with self._lock:
            self._unsaved[cause.value] += num_blocks

    def load_took(self, seconds: float) -> None:
        with self._lock:
            self._loads.add(seconds)

    def save_took(self, seconds: float) -> None:
        with self._lock:
            self._saves.add(seconds)

    def figures(
        self, tier: str, contents: TierContents, load_breaker: Breaker, save_breaker: Breaker
    ) -> TierFigures:
        with self._lock:
            return TierFigures(
                tier=tier,
                contents=contents,
                hits=self._hits,
                hit_bytes=self._hit_bytes,
                misses=dict(self._misses),
                num_saved=self._num_saved,
                saved_bytes=self._saved_bytes,
                unsaved=dict(self._unsaved),
                load_seconds=tuple(self._loads.counts),
                load_seconds_sum=self._loads.sum_seconds,
                save_seconds=tuple(self._saves.counts),
                save_seconds_sum=self._saves.sum_seconds,
                load_breaker=load_breaker.state,
                save_breaker=save_breaker.state,
                num_trips=load_breaker.num_trips + save_breaker.num_trips,
            )
