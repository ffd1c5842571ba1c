"""The memory of what is written for a while: a tensor's while it lives, a later one's after.

The one rule: a chunk is lent to one tensor at a time, and comes back when its last view is gone.
Memory that is new from the system costs a page fault for every 4 KiB that is first written: for a
prefill of 1,024 tokens on Qwen2.5-0.5B 30,000 of them, and to read its weights 190,000.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 64

# Of a matrix that lies in `WeightMemory`: norms are smaller, and of the largest there are few.
_LEAST_BYTES, _MOST_BYTES = 1 << 15, 1 << 26

_Chunk = npt.NDArray[np.uint8]


class ChunkMemory:
    """keeps_all: addresses stay good for ever, because recorded calls point there.

    Otherwise a chunk that is too small gives way to a larger one, so that there are never more
    chunks than tensors lived at once.
    """

    def __init__(self, *, keeps_all: bool) -> None:
        self._keeps_all = keeps_all
        self._free: list[_Chunk] = []  # by ascending size
        self._kept: list[_Chunk] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        index = bisect.bisect_left(self._free, num_bytes, key=len)
        chunk = self._free.pop(index) if index < len(self._free) else self._grow(num_bytes)
        lent = chunk[:num_bytes]
        weakref.finalize(lent, self._give_back, chunk)  # when no view of the tensor is left
        return torch.from_numpy(lent).view(dtype).view(*shape)

    def _grow(self, num_bytes: int) -> _Chunk:
        if not self._keeps_all and self._free:
            self._free.pop()
        chunk = _new_chunk(num_bytes)
        if self._keeps_all:
            self._kept.append(chunk)
        return chunk

    def _give_back(self, chunk: _Chunk) -> None:
        bisect.insort(self._free, chunk, key=len)


class WeightMemory:
    """Memory of matrices until they are packed: a layer's are as large as those of the one before.

    A chunk is lent to tensors of its own size alone, so one that is kept for good wastes nothing.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[_Chunk]] = defaultdict(list)  # by size

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        free = self._free[num_bytes]
        chunk = free.pop() if free else _new_chunk(num_bytes)
        lent = chunk[:]
        if num_bytes <= _MOST_BYTES:
            weakref.finalize(lent, free.append, chunk)  # when no view of the tensor is left
        return torch.from_numpy(lent).view(dtype).view(*shape)


def _new_chunk(num_bytes: int) -> _Chunk:
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)  # numpy asks for huge pages, torch does not
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + num_bytes]
