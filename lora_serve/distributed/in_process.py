"""Ranks as threads of one process, for tests and for looking into what ranks do."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.distributed.group import ROOT, own_columns, rows_in
from lora_serve.distributed.limits import RankLimits, TimeLimit
from lora_serve.errors import RankLostError

_COMMON_BYTES = 1 << 20
PATIENT = RankLimits(TimeLimit(60.0), TimeLimit(60.0))


class _Board:
    """Where the threads put their parts; one gather at a time."""

    def __init__(self, world_size: int) -> None:
        self.parts: list[Tensor | None] = [None] * world_size
        self.common = torch.empty(_COMMON_BYTES, dtype=torch.uint8)
        self.barrier = threading.Barrier(world_size)


class InProcessGroup:
    """One thread's `Group`. Make all of them with `in_process_groups`."""

    def __init__(self, rank: int, board: _Board, limits: RankLimits) -> None:
        self.rank = rank
        self.world_size = board.barrier.parties
        self._board = board
        self._limits = limits

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, *, while_loading: bool = False
    ) -> None:
        """Do what `Group` says."""
        limit = self._limits.load if while_loading else self._limits.step
        assert part.shape[1] == widths[self.rank], f"{tuple(part.shape)} of {widths}"
        if whole.data_ptr() == self._board.common.data_ptr():
            self._wait(limit)  # until all have read what was there
            whole.split(list(widths), dim=1)[self.rank].copy_(part)
            self._wait(limit)
            return
        self._board.parts[self.rank] = part
        self._wait(limit)
        self._spoil_common()
        parts = [part for part in self._board.parts if part is not None]
        num_rows = [len(part) for part in parts]
        assert num_rows == [len(whole)] * self.world_size, f"ranks gather {num_rows} rows"
        whole.copy_(torch.cat(parts, dim=1))
        self._wait(limit)  # until all have read it

    def all_to_all(self, rows: Tensor, shares: Sequence[range], parts: Tensor) -> None:
        """Do what `Group` says."""
        limit = self._limits.step
        self._board.parts[self.rank] = rows
        self._wait(limit)
        self._spoil_common()
        for part, theirs in zip(parts, self._board.parts, strict=True):
            assert theirs is not None, "all have come"
            part.copy_(own_columns(theirs, shares[self.rank]))
        self._wait(limit)  # until all have read it

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Do what `Group` says."""
        return rows_in(self._board.common, num_rows, width, dtype)

    def close(self) -> None:
        """Do what `Group` says, and end the waits of others: nobody watches a thread."""
        self._board.barrier.abort()

    def _spoil_common(self) -> None:
        """Fill common rows with what is no number: all have made their next call by now."""
        if self.rank == ROOT:
            self._board.common.fill_(0xFF)

    def _wait(self, limit: TimeLimit) -> None:
        try:
            self._board.barrier.wait(limit.seconds)
        except threading.BrokenBarrierError:
            raise RankLostError(f"a rank has ended, or did not come in {limit}") from None


def in_process_groups(world_size: int, limits: RankLimits = PATIENT) -> list[InProcessGroup]:
    """The groups of `world_size` ranks, one for each thread."""
    board = _Board(world_size)
    return [InProcessGroup(rank, board, limits) for rank in range(world_size)]
