"""Puts the ranks' parts of rows side by side, between the kernels of a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_serve.distributed.group import Group
from lora_serve.distributed.shares import Division, given, place_of
from lora_serve.ops.contract import Ops


class Gather:
    """Rows (T, a rank's share of a division) -> rows (T, its size).

    is_passing: the whole rows are read before the rank gathers again, and not written to.
    """

    def __init__(
        self, ops: Ops, group: Group, division: Division, *, is_passing: bool = False
    ) -> None:
        self._device = ops.device
        self._host_calls = ops.host_calls
        self._group = group
        self._is_passing = is_passing
        place = place_of(group)
        self._own = division.share(place)
        self._given = given(division, place)
        self._widths = [len(given(division, other)) for other in place.all()]

    def __call__(self, part: Tensor) -> Tensor:
        if self._given != self._own:
            part = part[:, self._given.start - self._own.start :]
        whole = self._rows(len(part), part.dtype)
        if self._host_calls is None:
            self._group.gather(part.contiguous(), self._widths, whole)
        else:
            # A copy of parts that are not contiguous is part of what is recorded.
            self._host_calls.run(lambda: self._group.gather(part.contiguous(), self._widths, whole))
        return whole

    def own(self, whole: Tensor) -> Tensor:
        """View the rank's share of whole rows."""
        return whole[:, self._own.start : self._own.stop]

    def _rows(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised whole rows."""
        shape = (num_rows, sum(self._widths))
        common = self._group.common_rows(*shape, dtype) if self._is_passing else None
        if common is not None:
            return common
        if self._host_calls is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._host_calls.new(*shape, dtype=dtype)
