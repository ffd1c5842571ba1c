"""Where the ranks of one model find each other: memory that they map, or files of torch's.

The engine's process makes it and takes it away; each rank opens its group there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lora_serve.config import EngineConfig
from lora_serve.config.parallel import NCCL
from lora_serve.distributed import shared_memory
from lora_serve.distributed.group import Group
from lora_serve.distributed.limits import rank_limits
from lora_serve.private_directory import PrivateDirectory
from lora_serve.worker.device import names_gpu

_SHARED_MEMORY = "shared_memory"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What a rank must know to find the others.

    memory: a descriptor; -1 where they exchange in another way what lies on the host. store,
    card_store: files of torch.distributed, for the host and for GPUs; None where there are none.
    """

    memory: int = -1
    store: Path | None = None
    card_store: Path | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that a rank's process must have."""
        return (self.memory,) if self.memory >= 0 else ()


class HeldRendezvous:
    """Makes one, at `place`; `close` takes it away."""

    def __init__(self, config: EngineConfig) -> None:
        self._directory: PrivateDirectory | None = None
        self._is_closed = False
        has_cards, is_in_memory = names_gpu(config.model.device), _is_in_memory(config)
        memory, store, card_store = -1, None, None
        if is_in_memory:
            memory = shared_memory.new_memory(config.parallel.tensor_parallel_size)
        if has_cards or not is_in_memory:
            self._directory = PrivateDirectory("lora-serve-ranks-", Path(tempfile.gettempdir()))
            store = None if is_in_memory else self._directory.path / "hosts"
            card_store = self._directory.path / "cards" if has_cards else None
        self.place = Rendezvous(memory, store, card_store)

    def close(self) -> None:
        """Again, it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._directory is not None:
            self._directory.close()
        for descriptor in self.place.descriptors:
            os.close(descriptor)


def open_group(
    rank: int, config: EngineConfig, place: Rendezvous, check: Callable[[], None]
) -> Group:
    """A rank's group, for what lies on the host. check: as of SharedMemoryGroup."""
    world_size, limits = config.parallel.tensor_parallel_size, rank_limits(config.limits)
    if place.store is None:
        return shared_memory.SharedMemoryGroup(rank, world_size, place.memory, limits, check)
    from lora_serve.distributed.torch_group import TorchGroup

    return TorchGroup(rank, world_size, place.store, limits)


def _is_in_memory(config: EngineConfig) -> bool:
    """Whether ranks exchange in shared memory what lies on the host."""
    chosen = config.parallel.tensor_parallel_backend
    if chosen in ("auto", NCCL):
        return shared_memory.is_supported()
    return chosen == _SHARED_MEMORY
