"""Puts the ranks' parts of rows side by side, between the kernels of a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_serve.distributed.group import Group
from lora_serve.distributed.shares import Division, given, place_of
from lora_serve.ops.contract import Ops


class Gather:
    """Rows (T, a rank's share of a division) -> rows (T, its size)."""

    def __init__(self, ops: Ops, group: Group, division: Division) -> None:
        self._device = ops.device
        self._host_calls = ops.host_calls
        self._group = group
        place = place_of(group)
        self._own = division.share(place)
        self._given = given(division, place)
        self._widths = [len(given(division, other)) for other in place.all()]

    def __call__(self, part: Tensor) -> Tensor:
        if self._given != self._own:
            part = part[:, self._given.start - self._own.start :]
        shape = (len(part), sum(self._widths))
        if self._host_calls is None:
            whole = torch.empty(shape, dtype=part.dtype, device=self._device)
            self._group.gather(part.contiguous(), self._widths, whole)
        else:
            whole = self._host_calls.new(*shape, dtype=part.dtype)
            # A copy of parts that are not contiguous is part of what is recorded.
            self._host_calls.run(lambda: self._group.gather(part.contiguous(), self._widths, whole))
        return whole

    def own(self, whole: Tensor) -> Tensor:
        """View the rank's share of whole rows."""
        return whole[:, self._own.start : self._own.stop]
