"""Ranks as threads of one process, for tests and for looking into what ranks do."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.distributed.group import ROOT, own_columns, rows_in
from lora_serve.errors import RankLostError

_COMMON_BYTES = 1 << 20


class _Meeting:
    """Where the threads put their parts; one gather at a time."""

    def __init__(self, world_size: int) -> None:
        self.parts: list[Tensor | None] = [None] * world_size
        self.common = torch.empty(_COMMON_BYTES, dtype=torch.uint8)
        self.barrier = threading.Barrier(world_size)


class InProcessGroup:
    """One thread's `Group`. Make all of them with `in_process_groups`."""

    def __init__(self, rank: int, meeting: _Meeting, seconds: float) -> None:
        self.rank = rank
        self.world_size = meeting.barrier.parties
        self._meeting = meeting
        self._seconds = seconds

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, seconds: float | None = None
    ) -> None:
        """Do what `Group` says."""
        assert part.shape[1] == widths[self.rank], f"{tuple(part.shape)} of {widths}"
        if whole.data_ptr() == self._meeting.common.data_ptr():
            self._wait(seconds)  # until all have read what was there
            whole.split(list(widths), dim=1)[self.rank].copy_(part)
            self._wait(seconds)
            return
        self._meeting.parts[self.rank] = part
        self._wait(seconds)
        self._spoil_common()
        whole.copy_(torch.cat([part for part in self._meeting.parts if part is not None], dim=1))
        self._wait(seconds)  # until all have read it

    def all_to_all(
        self,
        rows: Tensor,
        shares: Sequence[range],
        parts: Tensor,
        seconds: float | None = None,
    ) -> None:
        """Do what `Group` says."""
        self._meeting.parts[self.rank] = rows
        self._wait(seconds)
        self._spoil_common()
        for part, theirs in zip(parts, self._meeting.parts, strict=True):
            assert theirs is not None, "all have come"
            part.copy_(own_columns(theirs, shares[self.rank]))
        self._wait(seconds)  # until all have read it

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Do what `Group` says."""
        return rows_in(self._meeting.common, num_rows, width, dtype)

    def close(self) -> None:
        """Let no other rank wait for this one."""
        self._meeting.barrier.abort()

    def _spoil_common(self) -> None:
        """Fill common rows with what is no number: all have made their next call by now."""
        if self.rank == ROOT:
            self._meeting.common.fill_(0xFF)

    def _wait(self, seconds: float | None) -> None:
        try:
            self._meeting.barrier.wait(self._seconds if seconds is None else seconds)
        except threading.BrokenBarrierError:
            raise RankLostError("a rank has ended, or did not come in time") from None


def in_process_groups(world_size: int, seconds: float = 60.0) -> list[InProcessGroup]:
    """The groups of `world_size` ranks, one for each thread.

    seconds: that a rank waits for the others.
    """
    meeting = _Meeting(world_size)
    return [InProcessGroup(rank, meeting, seconds) for rank in range(world_size)]
