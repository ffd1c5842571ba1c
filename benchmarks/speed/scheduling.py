"""What a step costs the scheduler, without any model: `python -m benchmarks.speed.scheduling`.

Times `schedule` and `update_from_output` over many steps in which requests run, finish and are
admitted, beside a long queue of others over many adapters. Prints one row for each way to queue.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.facts import write_facts
from lora_serve.config import SchedulerConfig
from lora_serve.engine.core.process import spare_long_collections
from lora_serve.identity import BASE_MODEL, AdapterRef, BlockHasher, CacheNamespace, NoAdapter
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.manager import KVCacheManager
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.step import ModelRunnerOutput, RequestStepOutput, SchedulerOutput

BLOCK_SIZE = 16
PROMPT_TOKENS = 200
MAX_TOKENS = 100


class AllResident:
    """Every adapter is in memory."""

    def is_resident(self, ref: AdapterRef) -> bool:
        return True

    def request_load(self, ref: AdapterRef) -> None:
        raise NotImplementedError("all adapters are resident")

    def on_running(self, ref: AdapterRef) -> None: ...

    def on_idle(self, ref: AdapterRef) -> None: ...


@dataclass(frozen=True)
class Times:
    """Milliseconds a step."""

    schedule: list[float]
    update: list[float]


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds, and what 99 of 100 steps took at most."""

    queue: str
    schedule: float
    update: float
    both: float
    both_p99: float

    @classmethod
    def of(cls, queue: str, times: Times) -> Row:
        both = sorted(s + u for s, u in zip(times.schedule, times.update, strict=True))
        schedule, update = statistics.median(times.schedule), statistics.median(times.update)
        return cls(queue, schedule, update, statistics.median(both), both[int(0.99 * len(both))])

    def __str__(self) -> str:
        figures = (self.schedule, self.update, self.both, self.both_p99)
        return f"| {self.queue} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"


class Load:
    """A scheduler with `num_running` requests running, no more may, and `num_waiting` queued."""

    def __init__(
        self,
        num_running: int,
        num_waiting: int,
        num_adapters: int,
        fair_share: str,
        is_overlapped: bool = False,
    ) -> None:
        self._num_ahead = int(is_overlapped)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._rng = random.Random(0)
        self._num_waiting = num_waiting
        self._adapters: list[AdapterRef | NoAdapter] = [
            BASE_MODEL,
            *(AdapterRef(f"adapter{i}", i.to_bytes(32, "big")) for i in range(num_adapters)),
        ]
        self._is_fair = fair_share != "none"
        self._num_arrived = 0
        self._hasher = BlockHasher()
        config = SchedulerConfig(
            max_num_seqs=num_running, max_num_batched_tokens=2048, fair_share=fair_share
        )
        num_blocks = 2 * num_running * (PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE
        kv = KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
        self.scheduler = Scheduler(config, max(1, num_adapters), kv, AllResident(), KVConnector())

    def fill(self) -> None:
        """Let as many arrive as have ended, so that the queue keeps its length."""
        while self.scheduler.num_waiting < self._num_waiting:
            self.scheduler.add(self._request())

    def step(self, times: Times) -> None:
        begin = time.perf_counter()
        self._in_flight.append(self.scheduler.schedule())
        scheduled = time.perf_counter()
        if len(self._in_flight) <= self._num_ahead:
            return
        step = self._in_flight.popleft()
        outputs = tuple(RequestStepOutput((5,) * len(r.asked.samples)) for r in step.requests)
        sampled = time.perf_counter()
        self.scheduler.update_from_output(ModelRunnerOutput(step.step_id, outputs))
        times.schedule.append(1e3 * (scheduled - begin))
        times.update.append(1e3 * (time.perf_counter() - sampled))
        self.fill()

    def _request(self) -> Request:
        self._num_arrived += 1
        adapter = self._rng.choice(self._adapters)
        max_tokens = self._rng.randrange(1, MAX_TOKENS)
        return Request(
            request_id=f"r{self._num_arrived}",
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            seed=0,
            max_tokens=max_tokens,
            eos_token_ids=(),
            namespace=CacheNamespace(b"model", adapter),
            hasher=self._hasher,
            block_size=BLOCK_SIZE,
            sort_key=(0, self._num_arrived),
            token_ids=[self._rng.randrange(1000) for _ in range(PROMPT_TOKENS)],
            num_prompt_tokens=PROMPT_TOKENS,
            arrival_time=0.0,
            share=adapter.name if self._is_fair and adapter else "",
        )


def measure(load: Load, num_steps: int) -> Times:
    load.fill()
    for _ in range(50):  # until as many run as may
        load.step(Times([], []))
    times = Times([], [])
    for _ in range(num_steps):
        load.step(times)
    return times


def rows(num_running: int, num_waiting: int, num_steps: int) -> Iterator[Row]:
    """One for each way to queue."""
    ways = ((0, "none"), (64, "none"), (64, "adapter"))
    for num_adapters, fair_share in ways:
        load = Load(num_running, num_waiting, num_adapters, fair_share)
        name = f"{num_adapters} adapters, --fair-share {fair_share}"
        yield Row.of(name, measure(load, num_steps))
    load = Load(num_running, num_waiting, 64, "none", is_overlapped=True)
    yield Row.of("64 adapters, --async-scheduling", measure(load, num_steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-running", type=int, default=256)
    parser.add_argument("--num-waiting", type=int, default=10_000)
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    spare_long_collections()  # as the engine's process does
    print(f"{args.num_running} running, {args.num_waiting} waiting\n")
    print("| queue | schedule ms | update ms | both, median | both, p99 |")
    print("|---|--:|--:|--:|--:|")
    done = []
    for row in rows(args.num_running, args.num_waiting, args.num_steps):
        done.append(row)
        print(row, flush=True)
    write_facts(
        args.out, num_running=args.num_running, num_waiting=args.num_waiting, milliseconds=done
    )


if __name__ == "__main__":
    main()
