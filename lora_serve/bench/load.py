"""Drive a workload against one server: closed loop, open loop, or both at once.

A request leaves when its time has come and fewer than `max_concurrency` are running. With all
times 0 that is a closed loop; with Poisson times and no limit, an open one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_serve.bench.client import Endpoint, RequestRecord, send
from lora_serve.bench.workload import TimedRequest

OnDone = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """records: in the workload's order. client_cpu_seconds: what the measuring itself took."""

    records: tuple[RequestRecord, ...]
    wall_seconds: float
    client_cpu_seconds: float


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[TimedRequest],
    max_concurrency: int | None = None,
    on_done: OnDone = lambda record: None,
) -> LoadResult:
    """Send every request and wait for every answer.

    Args:
        endpoint: the server.
        requests: in the order of their times.
        max_concurrency: most requests running at once; None is no limit.
        on_done: called with each record as it completes.
    """
    free = asyncio.Semaphore(max_concurrency or len(requests))
    start, cpu = time.perf_counter(), time.process_time()

    async def one(timed: TimedRequest) -> RequestRecord:
        try:
            record = await send(endpoint, timed, start + timed.at_seconds)
        finally:
            free.release()
        on_done(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for timed in requests:
            await asyncio.sleep(max(0.0, start + timed.at_seconds - time.perf_counter()))
            await free.acquire()
            tasks.append(group.create_task(one(timed)))
    records = tuple(task.result() for task in tasks)
    return LoadResult(records, time.perf_counter() - start, time.process_time() - cpu)
