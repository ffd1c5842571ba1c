"""Ranks of one machine that gather through memory which all of them map.

Each rank has two slots and a counter. Gather number n: a rank copies its part into its slot n % 2,
sets its counter to n, and copies the others' parts out once their counters are at n.

    [counter 0][counter 1]…   64 bytes each        [slot 0 of rank 0][slot 1 of rank 0][slot 0 …
    [common rows]

A rank writes the slot of gather n when all counters are at n - 1: a counter is raised after its
rank has read all of gather n - 2, which lay in that slot. Counters are numbers of 8 bytes, and a
processor of the x86 family shows others its writes in their order; so these serve no other.

Common rows are copied once: a rank writes its columns of them, and reads the others' where they
are. If they were gathered last in gather m, a rank writes them again when all counters are beyond
m, for a rank raises its own when it has read them. Where no gather came between, they first wait
for each other.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.distributed.group import rows_in
from lora_serve.distributed.limits import RankLimits, TimeLimit
from lora_serve.errors import RankLostError

SLOT_BYTES = (
    4 << 20
)  # the longest row that can be gathered; longer parts are gathered piece by piece
# Of common rows, as many as are used: 8,192 tokens of 16,384 channels in 16 bits fill them.
COMMON_BYTES = 256 << 20
_LINE = 64
_HUGE_PAGE = 2 << 20
_WORD = 8
_SPINS = 200  # looks without giving the core away, some 10 microseconds
_YIELDS = 2000  # looks after which a rank sleeps between two of them
_NAP_SECONDS = 0.0005

Bytes = npt.NDArray[np.uint8]


def is_supported() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def new_memory(world_size: int) -> int:
    """A descriptor of memory for so many ranks, which is gone with the last of them."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("lora-serve-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _begin_of_common(world_size) + COMMON_BYTES)
    return descriptor


def _begin_of_common(world_size: int) -> int:
    return -(-world_size * (_LINE + 2 * SLOT_BYTES) // _HUGE_PAGE) * _HUGE_PAGE


class Counters:
    """How far each rank has come, for those who only look."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        self._map = mmap.mmap(descriptor, world_size * _LINE, access=mmap.ACCESS_READ)

    def close(self) -> None:
        self._map.close()

    def late_ranks(self) -> list[int]:
        """The ranks that another one waits for; none where all have come equally far."""
        with memoryview(self._map).cast("q") as words:
            turns = words[:: _LINE // _WORD].tolist()
        return [rank for rank, turn in enumerate(turns) if turn < max(turns)]


class SharedMemoryGroup:
    """One rank's `Group`. One thread at a time calls it."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        descriptor: int,
        limits: RankLimits,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """check: called now and then by a rank that waits; raises when it waits in vain."""
        self.rank = rank
        self.world_size = world_size
        self._limits = limits
        self._check = check
        begin = _begin_of_common(world_size)
        self._map = mmap.mmap(descriptor, begin + COMMON_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them: smaller pages do
                self._map.madvise(mmap.MADV_HUGEPAGE, begin, COMMON_BYTES)
        self._counters = memoryview(self._map)[: world_size * _LINE].cast("q")
        slots = np.frombuffer(self._map, np.uint8, world_size * 2 * SLOT_BYTES, world_size * _LINE)
        self._slots = slots.reshape(world_size, 2, SLOT_BYTES)
        self._common = torch.from_numpy(np.frombuffer(self._map, np.uint8, COMMON_BYTES, begin))
        self._num_gathers = 0
        self._last_of_common = 0  # the number of the gather that has written them

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, *, while_loading: bool = False
    ) -> None:
        """Do what `Group` says."""
        limit = self._limits.load if while_loading else self._limits.step
        if whole.data_ptr() == self._common.data_ptr():
            self._gather_in_place(part, widths, whole, limit)
            return
        sizes = [width * part.itemsize for width in widths]
        own, result = _bytes(part), _bytes(whole)
        ends = list(accumulate(sizes))
        for some in _pieces(len(part), max(sizes)):
            self._put(own[some])
            for rank, (size, end) in enumerate(zip(sizes, ends, strict=True)):
                result[some, end - size : end] = self._taken(rank, own[some], size, limit)

    def all_to_all(self, rows: Tensor, shares: Sequence[range], parts: Tensor) -> None:
        """Do what `Group` says."""
        limit = self._limits.step
        own, share, itemsize = _bytes(rows), shares[self.rank], rows.itemsize
        columns = slice(share.start * itemsize, share.stop * itemsize)
        results = list(map(_bytes, parts))
        for some in _pieces(*own.shape):
            self._put(own[some])
            for rank, result in enumerate(results):
                result[some] = self._taken(rank, own[some], own.shape[1], limit)[:, columns]

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Do what `Group` says."""
        return rows_in(self._common, num_rows, width, dtype)

    def close(self) -> None:
        """Do what `Group` says."""
        self._counters.release()
        self._slots = self._slots[:0]
        self._common = self._common[:0]
        with suppress(BufferError):  # recorded steps have common rows: it goes with the last one
            self._map.close()

    def _gather_in_place(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, limit: TimeLimit
    ) -> None:
        if self._num_gathers == self._last_of_common:
            self._wait_for_all(limit)  # others may be reading them yet
        begin = sum(widths[: self.rank]) * part.itemsize
        own = _bytes(part)
        _bytes(whole)[:, begin : begin + own.shape[1]] = own
        self._wait_for_all(limit)
        self._last_of_common = self._num_gathers

    def _wait_for_all(self, limit: TimeLimit) -> None:
        """Do the next gather, of what lies in no slot."""
        self._raise_counter(self._num_gathers + 1)
        for rank in range(self.world_size):
            if rank != self.rank:
                self._await(rank, self._num_gathers, limit)

    def _put(self, own: Bytes) -> None:
        """Begin the next gather with this rank's rows."""
        turn = self._num_gathers + 1
        self._slots[self.rank, turn % 2, : own.size] = own.reshape(-1)
        self._raise_counter(turn)

    def _raise_counter(self, turn: int) -> None:
        self._num_gathers = turn
        self._counters[self.rank * _LINE // _WORD] = turn

    def _taken(self, rank: int, own: Bytes, size: int, limit: TimeLimit) -> Bytes:
        """What a rank has put, as many rows as the own ones, of so many bytes."""
        if rank == self.rank:
            return own
        turn, rows = self._num_gathers, len(own)
        self._await(rank, turn, limit)
        return self._slots[rank, turn % 2, : rows * size].reshape(rows, size)

    def _await(self, rank: int, turn: int, limit: TimeLimit) -> None:
        """Wait for a rank's counter: at first without giving the core away, then ever lazier."""
        counters, place = self._counters, rank * _LINE // _WORD
        for _ in range(_SPINS):
            if counters[place] >= turn:
                return
        for _ in range(_YIELDS):
            if counters[place] >= turn:
                return
            os.sched_yield()
        deadline = time.monotonic() + limit.seconds
        while counters[place] < turn:
            self._check()
            if time.monotonic() > deadline:
                raise RankLostError(
                    f"rank {rank} hangs: rank {self.rank} has waited for it for {limit}"
                )
            time.sleep(_NAP_SECONDS)


def _pieces(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """The rows in pieces that a slot holds."""
    assert row_bytes <= SLOT_BYTES, f"rows of {row_bytes} bytes"
    at_once = max(1, SLOT_BYTES // max(1, row_bytes))
    for start in range(0, num_rows, at_once):
        yield slice(start, start + at_once)


def _bytes(rows: Tensor) -> Bytes:
    """(T, bytes of a row), of a contiguous tensor's memory."""
    array: Bytes = rows.view(torch.uint8).numpy()
    return array
