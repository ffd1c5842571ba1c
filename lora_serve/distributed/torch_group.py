"""Ranks that gather through torch.distributed: gloo between processes, NCCL between GPUs.

NCCL has not been tried yet. No process group of torch's own is made the default one: two engines
fit in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lora_serve.distributed.group import own_columns
from lora_serve.errors import RankLostError


class TorchGroup:
    """One rank's `Group`, by which bytes are gathered, whatever numbers they are."""

    def __init__(
        self, rank: int, world_size: int, meeting: Path, seconds: float, backend: str = "gloo"
    ) -> None:
        """meeting: a file that all ranks see, in a directory that exists; it is not there yet.

        backend: "gloo", or "nccl" for tensors on GPUs.
        """
        self.rank = rank
        self.world_size = world_size
        self._seconds = seconds
        limit = timedelta(seconds=seconds)
        store = c10d.FileStore(str(meeting), world_size)
        store.set_timeout(limit)
        self._group: Any = _opened(backend, store, rank, world_size, limit)

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, seconds: float | None = None
    ) -> None:
        """Do what `Group` says."""
        sizes = [width * part.itemsize for width in widths]
        longest = max(sizes)
        own = torch.zeros(len(part), longest, dtype=torch.uint8, device=part.device)
        own[:, : sizes[self.rank]] = part.view(torch.uint8)
        parts = [torch.empty_like(own) for _ in sizes]
        limit = self._limit(seconds)
        self._wait(lambda: self._group.allgather([parts], [own]), limit)
        result, begin = whole.view(torch.uint8), 0
        for other, size in zip(parts, sizes, strict=True):
            result[:, begin : begin + size] = other[:, :size]
            begin += size

    def all_to_all(
        self,
        rows: Tensor,
        shares: Sequence[range],
        parts: Tensor,
        seconds: float | None = None,
    ) -> None:
        """Do what `Group` says."""
        sent = [own_columns(rows, share).reshape(-1).view(torch.uint8) for share in shares]
        taken = parts.view(-1).view(torch.uint8)
        sizes = [len(taken) // len(shares)] * len(shares)
        message, limit = torch.cat(sent), self._limit(seconds)
        self._wait(
            lambda: self._group.alltoall_base(taken, message, sizes, list(map(len, sent))), limit
        )

    def close(self) -> None:
        """Do what `Group` says."""
        del self._group

    def _limit(self, seconds: float | None) -> timedelta:
        return timedelta(seconds=self._seconds if seconds is None else seconds)

    def _wait(self, begin: Callable[[], Any], limit: timedelta) -> None:
        try:
            begin().wait(limit)
        except RuntimeError as error:
            raise RankLostError(f"rank {self.rank} waits in vain for others: {error}") from error


def _opened(
    backend: str, store: c10d.FileStore, rank: int, world_size: int, limit: timedelta
) -> c10d.Backend:
    if backend == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit
        return c10d.ProcessGroupNCCL(store, rank, world_size, options)
    gloo = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = limit
    # On the loopback address: no other machine has a rank.
    gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(store, rank, world_size, gloo)
