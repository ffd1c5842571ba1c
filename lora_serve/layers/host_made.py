"""What elementwise torch makes between the kernels of a forward, also in a recorded step.

No bit may depend on where a row lies: nothing here may sum over rows, or over parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lora_serve.ops.contract import Ops


def host_made(
    ops: Ops, shape: Sequence[int], dtype: torch.dtype, fill: Callable[[Tensor], object]
) -> Tensor:
    """A tensor that `fill` fills now, or in each replay of a recorded step."""
    calls = ops.host_calls
    if calls is None:
        made = torch.empty(*shape, dtype=dtype, device=ops.device)
        fill(made)
        return made
    made = calls.new(*shape, dtype=dtype)
    calls.run(lambda: _done(fill(made)))
    return made


class Clip:
    """Brings values into [-limit, limit], in place."""

    def __init__(self, ops: Ops, limit: float) -> None:
        self._calls = ops.host_calls
        self._limit = limit

    def __call__(self, x: Tensor) -> None:
        if self._calls is None:
            x.clamp_(-self._limit, self._limit)
        else:
            self._calls.run(lambda: _done(x.clamp_(-self._limit, self._limit)))


def _done(_: object) -> None:
    """Gives nothing, as a noted call does."""
