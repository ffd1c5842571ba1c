"""A model's shares computed side by side by ranks that exchange nothing.

Each computes what a rank computes, of rows that lack the others' parts. So the results are wrong,
and the time is what ranks take at least, however fast they exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import EngineConfig
from lora_serve.model_info import ModelInfo
from lora_serve.step import ModelRunnerOutput, SchedulerOutput
from lora_serve.worker.worker import Worker

_FEW = 64  # numbers: what ranks agree on while they load


class NoExchange:
    """A rank's `Group` in which no other ever comes, and none is waited for."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, seconds: float | None = None
    ) -> None:
        """Put the own part into its place; few numbers are taken for those of all ranks."""
        places = whole.split(list(widths), dim=1)
        for rank, place in enumerate(places):
            is_told_for_all = part.numel() <= _FEW and place.shape == part.shape
            if rank == self.rank or is_told_for_all:
                place.copy_(part)

    def all_to_all(
        self,
        rows: Tensor,
        shares: Sequence[range],
        parts: Tensor,
        seconds: float | None = None,
    ) -> None:
        """Take the own columns alone."""
        share = shares[self.rank]
        parts[self.rank].copy_(rows[:, share.start : share.stop])

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """No memory is common."""
        return None

    def close(self) -> None:
        """Nothing is held."""


class SharesApart:
    """An `Executor` whose workers each have a rank's share, and a thread of this process."""

    def __init__(self, config: EngineConfig, num_ranks: int) -> None:
        self._workers = [
            Worker(
                config.model,
                config.cache,
                config.lora,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
                group=NoExchange(rank, num_ranks),
            )
            for rank in range(num_ranks)
        ]
        self._threads = [ThreadPoolExecutor(1) for _ in self._workers]

    def load(self) -> ModelInfo:
        """Load all shares."""
        loading = [
            thread.submit(worker.load)
            for thread, worker in zip(self._threads, self._workers, strict=True)
        ]
        first, *_ = [each.result() for each in loading]
        return first

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """Refuse: loading an adapter exchanges no rows."""
        raise NotImplementedError

    def submit(self, step: SchedulerOutput) -> None:
        """Execute the step on all shares."""
        self._running = [
            thread.submit(_execute, worker, step)
            for thread, worker in zip(self._threads, self._workers, strict=True)
        ]

    def collect(self) -> ModelRunnerOutput:
        """Wait for all shares; returns what the first one takes for the output."""
        first, *_ = [each.result() for each in self._running]
        return first

    def close(self) -> None:
        """End the threads."""
        for thread, worker in zip(self._threads, self._workers, strict=True):
            worker.close()
            thread.shutdown()


def _execute(worker: Worker, step: SchedulerOutput) -> ModelRunnerOutput:
    worker.submit(step)
    return worker.collect()
