"""Looks at the server every few seconds: its processes off /proc, its engine through /metrics."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.processes import Footprint, engine_pid, footprint
from benchmarks.soak.journal import Journal
from lora_serve.bench.http_stream import HttpFault, Origin, request

PERIOD_SECONDS = 5.0
LOOKS = 5  # in a period, at what comes and goes faster
GONE = Footprint(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One moment, and the period before it. seconds: since the soak's begin.

    engine_pid: 0 while there is none. The engine's own figures are then those of its last word.
    used_blocks, num_running, num_waiting: the most that was seen in the period.
    outcomes: by kind, since the begin.
    """

    seconds: float
    api: Footprint
    engine: Footprint
    engine_pid: int
    num_blocks: float
    used_blocks: float
    num_running: float
    num_waiting: float
    num_leases: int
    disk_bytes: int
    answers_per_second: float
    p50_ms: float
    p99_ms: float
    outcomes: dict[str, int]


@dataclass(slots=True)
class Totals:
    """Counters of engines that live one after the other, each of which begins at 0."""

    values: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if "_total" in name:
                before = self._last.get(name, 0.0)
                self._last[name] = value
                grown = value - before if value >= before else value
                self.values[name] = self.values.get(name, 0.0) + grown


class Sampler:
    def __init__(self, origin: Origin, server_pid: int, kv_path: Path, journal: Journal) -> None:
        self._origin = origin
        self._server_pid = server_pid
        self._kv_path = kv_path
        self._journal = journal
        self._last_time = time.monotonic()
        self.samples: list[Sample] = []
        self.totals = Totals()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.take()

    async def take(self) -> Sample:
        """Look for a period, and keep what was seen."""
        looks = []
        for _ in range(LOOKS):
            await asyncio.sleep(PERIOD_SECONDS / LOOKS)
            looks.append(await read_metrics(self._origin))
            self.totals.add(looks[-1])
        now = time.monotonic()
        latencies = sorted(self._journal.take_latencies())
        pid = engine_pid(self._server_pid)
        blocks = most(looks, "num_gpu_blocks")
        sample = Sample(
            seconds=round(now - self._journal.began_at, 2),
            api=footprint(self._server_pid) or GONE,
            engine=(footprint(pid) if pid else None) or GONE,
            engine_pid=pid or 0,
            num_blocks=blocks,
            used_blocks=round(most(looks, "vllm:kv_cache_usage_perc") * blocks),
            num_running=most(looks, "vllm:num_requests_running"),
            num_waiting=most(looks, "vllm:num_requests_waiting"),
            num_leases=await self._num_leases(),
            disk_bytes=await asyncio.to_thread(bytes_below, self._kv_path),
            answers_per_second=round(len(latencies) / (now - self._last_time), 2),
            p50_ms=round(1e3 * statistics.median(latencies), 1) if latencies else 0.0,
            p99_ms=round(1e3 * latencies[int(0.99 * len(latencies))], 1) if latencies else 0.0,
            outcomes=dict(self._journal.counts),
        )
        self._last_time = now
        self.samples.append(sample)
        return sample

    async def _num_leases(self) -> int:
        text = await get(self._origin, "/v1/models")
        cards = json.loads(text).get("data", []) if text else []
        return sum(card.get("num_leases", 0) for card in cards)


def most(looks: Sequence[Mapping[str, float]], name: str) -> float:
    return max(look.get(name, 0.0) for look in looks)


async def read_metrics(origin: Origin) -> dict[str, float]:
    """Values by name, and by name{tier} where there are tiers; sums over all other labels."""
    values: dict[str, float] = {}
    for line in (await get(origin, "/metrics")).splitlines():
        if line.startswith("#") or "_bucket{" in line:
            continue
        labelled, _, value = line.rpartition(" ")
        name, _, labels = labelled.partition("{")
        if 'tier="' in labels:
            name += "{" + labels.partition('tier="')[2].partition('"')[0] + "}"
        values[name] = values.get(name, 0.0) + float(value)
        if 'num_gpu_blocks="' in labels:
            values["num_gpu_blocks"] = float(labels.partition('num_gpu_blocks="')[2].split('"')[0])
    return values


async def get(origin: Origin, path: str) -> str:
    """Empty where no server answers, as between two engines."""
    try:
        async with request(origin, "GET", path, {}) as response:
            return (await response.read()).decode()
    except (OSError, HttpFault):
        return ""


def bytes_below(directory: Path) -> int:
    """What the files below it take; what vanishes meanwhile takes nothing."""
    total = 0
    for parent, _, names in os.walk(directory):  # skips directories that are gone
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
