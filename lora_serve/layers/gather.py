"""Puts the ranks' parts of rows side by side, between the kernels of a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_serve.distributed.group import Group
from lora_serve.distributed.shares import place_of
from lora_serve.ops.contract import Ops


class Gather:
    """Rows (T, a rank's share of width) -> rows (T, width)."""

    def __init__(self, ops: Ops, group: Group, width: int) -> None:
        self._device = ops.device
        self._host_calls = ops.host_calls
        self._group = group
        self._widths = place_of(group).widths(width)

    def __call__(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        shape = (len(part), sum(self._widths))
        if self._host_calls is None:
            whole = torch.empty(shape, dtype=part.dtype, device=self._device)
            self._group.gather(part, self._widths, whole)
        else:
            whole = self._host_calls.new(*shape, dtype=part.dtype)
            self._host_calls.run(lambda: self._group.gather(part, self._widths, whole))
        return whole
