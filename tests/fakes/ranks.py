"""The ranks of one model as threads of this process: real workers, links and executor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_serve.config import CacheConfig, LoRAConfig, ModelConfig
from lora_serve.config.parallel import WHOLE_ROWS, Reduce
from lora_serve.distributed.group import Group
from lora_serve.distributed.in_process import in_process_groups
from lora_serve.distributed.limits import RankLimits, TimeLimit
from lora_serve.distributed.link import Link, new_link
from lora_serve.errors import RankLostError
from lora_serve.worker.rank_executor import RankExecutor
from lora_serve.worker.rank_server import RankLinks, serve_rank
from lora_serve.worker.worker import Worker

SECONDS = 60.0
LIMIT = TimeLimit(SECONDS)
LIMITS = RankLimits(LIMIT, LIMIT)


def make_rank(
    directory: Path,
    group: Group,
    kind: type[Worker] = Worker,
    reduce: Reduce = WHOLE_ROWS,
    **settings: Any,
) -> Worker:
    """A worker with 64 blocks on the native kernels; settings are ModelConfig's."""
    return kind(
        ModelConfig(model=str(directory), **{"cpu_threads": 1, **settings}),
        CacheConfig(num_gpu_blocks_override=64),
        LoRAConfig(enable_lora=True, max_loras=2),
        max_num_seqs=8,
        max_num_batched_tokens=256,
        group=group,
        reduce=reduce,
    )


def start_threads(
    world_size: int,
    make: Callable[[Group], Worker],
    serve: Callable[[Worker, RankLinks], object] = serve_rank,
    limits: RankLimits = LIMITS,
) -> RankExecutor:
    """An executor over so many ranks, the first in the caller's thread. make: each rank's worker.

    serve: what the others' threads run.
    """
    first, *others = in_process_groups(world_size, limits)
    links: list[RankLinks] = []
    threads: list[threading.Thread] = []
    for group in others:
        (steps, its_steps), (calls, its_calls) = (new_link(f"rank {group.rank}") for _ in "12")
        links.append(RankLinks(steps, calls))
        its = RankLinks(Link(its_steps, "the first rank"), Link(its_calls, "the first rank"))
        thread = threading.Thread(target=_serve, args=(serve, make, group, its), daemon=True)
        threads.append(thread)
        thread.start()

    def close() -> None:
        for each in links:
            each.close()
        for thread in threads:
            thread.join(SECONDS)

    return RankExecutor(make(first), links, limits, close)


def _serve(
    serve: Callable[[Worker, RankLinks], object],
    make: Callable[[Group], Worker],
    group: Group,
    links: RankLinks,
) -> None:
    try:
        with contextlib.suppress(RankLostError):  # the first rank is gone
            serve(make(group), links)
    finally:
        group.close()
        links.close()
