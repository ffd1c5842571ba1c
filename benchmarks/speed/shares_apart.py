"""A model's shares computed side by side by ranks that exchange nothing.

Each computes what a rank computes, of rows that lack the others' parts. So the results are wrong,
and the time is what ranks take at least, however fast they exchange.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from lora_serve.config import EngineConfig
from lora_serve.step import SchedulerOutput
from lora_serve.worker.worker import Worker

_FEW = 64  # numbers: what ranks agree on while they load


class NoExchange:
    """A rank's `Group` in which no other ever comes, and none is waited for."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, *, while_loading: bool = False
    ) -> None:
        """Put the own part into its place; few numbers are taken for those of all ranks."""
        places = whole.split(list(widths), dim=1)
        for rank, place in enumerate(places):
            is_told_for_all = part.numel() <= _FEW and place.shape == part.shape
            if rank == self.rank or is_told_for_all:
                place.copy_(part)

    def all_to_all(self, rows: Tensor, shares: Sequence[range], parts: Tensor) -> None:
        """Take the own columns alone."""
        share = shares[self.rank]
        parts[self.rank].copy_(rows[:, share.start : share.stop])

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """No memory is common."""
        return None

    def close(self) -> None:
        """Nothing is held."""


class SharesApart:
    """Processes that each compute a rank's share of every step. Knows no adapters."""

    def __init__(self, config: EngineConfig, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._links = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_compute, args=(its, config, rank, num_ranks), daemon=True)
            for rank, (_, its) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def load(self) -> None:
        """Wait until all shares are loaded."""
        self._wait()

    def run(self, step: SchedulerOutput) -> None:
        """Execute the step on all shares, and wait for the slowest."""
        for link in self._links:
            link.send(step)
        self._wait()

    def close(self) -> None:
        """End the processes."""
        for link, process in zip(self._links, self._processes, strict=True):
            link.close()
            process.join()

    def _wait(self) -> None:
        for link in self._links:
            link.recv()


def _compute(link: Connection, config: EngineConfig, rank: int, num_ranks: int) -> None:
    """Load a share and execute each step that comes, until the other end is closed."""
    worker = Worker.of(config, group=NoExchange(rank, num_ranks))
    worker.load()
    with suppress(EOFError):
        while True:
            link.send(None)
            worker.submit(link.recv())
            worker.collect()
