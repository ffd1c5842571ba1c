"""Tells, while ranks load, which of them the others wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lora_serve.distributed import shared_memory

_LOOK_SECONDS = 0.5  # between two looks


class LateRanks:
    """Looks in a thread of its own, from `start` to `end`, at memory in which ranks gather."""

    def __init__(self, memory: int, world_size: int, tell: Callable[[Sequence[int]], None]) -> None:
        """tell: called in the thread, whenever it is others that are late, or none any more."""
        self._memory = memory
        self._world_size = world_size
        self._tell = tell
        self._has_ended = threading.Event()

    def start(self) -> None:
        """Map the memory, which may be closed from then on."""
        counters = shared_memory.Counters(self._memory, self._world_size)
        threading.Thread(
            target=self._look, args=(counters,), name="late-ranks", daemon=True
        ).start()

    def end(self) -> None:
        self._has_ended.set()

    def _look(self, counters: shared_memory.Counters) -> None:
        told: list[int] = []
        while not self._has_ended.wait(_LOOK_SECONDS):
            late = counters.late_ranks()
            if late != told:
                self._tell(late)
            told = late
        counters.close()
