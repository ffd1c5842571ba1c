"""Ranks that gather through torch.distributed: gloo between processes, NCCL between GPUs.

No process group of torch's own is made the default one: two engines fit in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lora_serve.distributed.group import own_columns
from lora_serve.distributed.limits import RankLimits, TimeLimit
from lora_serve.errors import RankLostError

# In which all ranks connect, whatever a step may take: they import torch first.
CONNECT_SECONDS = 120.0

Open = Callable[[c10d.Store, int, int, timedelta], c10d.Backend]


def open_gloo(store: c10d.Store, rank: int, world_size: int, limit: timedelta) -> c10d.Backend:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    # On the loopback address: no other machine has a rank.
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(store, rank, world_size, options)


class TorchGroup:
    """One rank's `Group`, by which bytes are gathered, whatever numbers they are."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store_path: Path,
        limits: RankLimits,
        open_backend: Open = open_gloo,
    ) -> None:
        """store_path: a file that all ranks see, in a directory that exists; it is not there yet.

        Raises:
            RankLostError: the others did not come in time.
        """
        self.rank = rank
        self.world_size = world_size
        self._limits = limits
        connect_limit = timedelta(seconds=max(limits.step.seconds, CONNECT_SECONDS))
        # The backend ends what takes longer than this, whatever it is waited for.
        limit = max(timedelta(seconds=limits.longest), connect_limit)
        try:
            store = c10d.FileStore(str(store_path), world_size)
            store.set_timeout(connect_limit)
            self._backend: Any = open_backend(store, rank, world_size, limit)
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} cannot connect to the others: {error}") from error

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, *, while_loading: bool = False
    ) -> None:
        """Do what `Group` says."""
        limit = self._limits.load if while_loading else self._limits.step
        num_rows, longest = len(part), max(widths)
        own = part
        if part.shape[1] < longest:
            own = part.new_empty(num_rows, longest)
            own[:, : part.shape[1]] = part
        # Where a row's parts are as long as each other, one row is whole as it comes.
        is_whole = num_rows == 1 and sum(widths) == longest * self.world_size
        parts = whole if is_whole else part.new_empty(self.world_size, num_rows, longest)
        self._all_gather(_bytes(parts), _bytes(own), limit)
        if not is_whole:
            columns = whole.split(list(widths), dim=1)
            for into, other, width in zip(columns, parts, widths, strict=True):
                into.copy_(other[:, :width])

    def all_to_all(self, rows: Tensor, shares: Sequence[range], parts: Tensor) -> None:
        """Do what `Group` says."""
        sent = [_bytes(own_columns(rows, share).contiguous()) for share in shares]
        taken = _bytes(parts)
        sizes = [len(taken) // len(shares)] * len(shares)
        self._exchange(taken, torch.cat(sent), sizes, list(map(len, sent)))

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Do what `Group` says."""
        return None

    def close(self) -> None:
        """Do what `Group` says."""
        del self._backend

    def _await(self, work: Any, limit: timedelta) -> None:
        """Wait for what a backend has begun; RuntimeError if it fails or takes too long."""
        work.wait(limit)

    def _all_gather(self, taken: Tensor, own: Tensor, limit: TimeLimit) -> None:
        """Bytes (world_size * n) of all ranks, of n that each gives."""
        if not len(own):
            return  # of no rank
        options = c10d.AllgatherOptions()
        options.asyncOp = False  # NCCL's is then work of the stream that kernels run on
        self._done(partial(self._backend._allgather_base, taken, own, options), limit)

    def _exchange(
        self,
        taken: Tensor,
        sent: Tensor,
        taken_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> None:
        options = c10d.AllToAllOptions()
        options.asyncOp = False
        sizes = (taken_sizes, sent_sizes)
        begin = partial(self._backend.alltoall_base, taken, sent, *sizes, options)
        self._done(begin, self._limits.step)

    def _done(self, begin: Callable[[], Any], limit: TimeLimit) -> None:
        try:
            self._await(begin(), timedelta(seconds=limit.seconds))
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.rank} waits in vain for others, at most for {limit}: {error}"
            ) from error


def _bytes(values: Tensor) -> Tensor:
    """A contiguous tensor's memory."""
    return values.view(-1).view(torch.uint8)
