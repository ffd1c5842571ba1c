"""Tables of numbers that a step's kernels read: made on the host, read at a fixed address.

A plan's launch knows bounds of its tables' lengths only, so a captured launch serves each table
that is written over the first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def overwrite(table: Tensor, words: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> None:
    """Write `words` to the head of `table`, in the order of the current stream."""
    assert len(words) <= len(table), f"{len(words)} words for a reserved table of {len(table)}"
    source = torch.from_numpy(words)
    if table.device.type == "cuda":
        source = source.pin_memory()
    table[: len(words)].copy_(source, non_blocking=True)
