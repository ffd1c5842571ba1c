"""How long work takes on a device, without the time that the host takes to ask for it.

On a GPU the work is recorded as a graph and timed by the card's own clock; on a CPU, where this
only tries the scripts out, by the host's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

TURNS = 9
FLUSH_BYTES = 256 << 20  # several times what a card's last cache holds


class Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        size = FLUSH_BYTES if device.type == "cuda" else 1
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median of several runs, each with nothing of the last one in the caches."""
        wait_for(self._device)  # kernels may read weights and positions ahead of what made them
        run()
        if self._device.type != "cuda":
            return statistics.median(_host_seconds(run) for _ in range(3))
        replay = _recorded(run)
        return statistics.median(self._card_seconds(replay) for _ in range(TURNS))

    def _card_seconds(self, run: Callable[[], object]) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def _recorded(run: Callable[[], object]) -> Callable[[], object]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _host_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
