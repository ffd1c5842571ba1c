"""A linear layer that is divided by its inputs, too: what segments of these give is added up.

The one rule: neighbours are added in pairs, then pairs, and so on, and each sum is rounded to the
model's dtype. So the bits depend on how many segments there are, and not on which rank has which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lora_serve.distributed.group import Group
from lora_serve.distributed.shares import Evenly, place_of
from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.gather import Gather
from lora_serve.layers.linear import Linear
from lora_serve.ops.contract import Ops


class SumOfRanks:
    """The sum (T, width) of what all ranks have of it, on each of them.

    A rank sums its share of the columns, and the shares are gathered. Two ranks exchange all they
    have, which is as many bytes in one exchange less.
    """

    def __init__(self, ops: Ops, group: Group, width: int) -> None:
        self._add = ops.rowwise.add
        self._device = ops.device
        self._host_calls = ops.host_calls
        self._group = group
        places, whole = place_of(group).all(), Evenly(width)
        is_pair = len(places) == 2
        self._shares = [range(width) if is_pair else whole.share(place) for place in places]
        self._gather = None if is_pair else Gather(ops, group, whole)

    def __call__(self, rows: Tensor) -> Tensor:
        group, shares = self._group, self._shares
        shape = (len(shares), len(rows), len(shares[group.rank]))
        if self._host_calls is None:
            parts = torch.empty(shape, dtype=rows.dtype, device=self._device)
            group.all_to_all(rows, shares, parts)
        else:
            parts = self._host_calls.new(*shape, dtype=rows.dtype)
            self._host_calls.run(lambda: group.all_to_all(rows, shares, parts))
        own = sum_in_pairs(len(shares), lambda rank: parts[rank], self._add)
        return own if self._gather is None else self._gather(own)


class SummedLinear:
    """segments: this rank's, and how many of its rows' columns each takes, side by side.

    sum_of_ranks: None where one rank has all segments.
    """

    def __init__(
        self,
        ops: Ops,
        segments: Sequence[tuple[int, Linear]],
        sum_of_ranks: SumOfRanks | None,
    ) -> None:
        self._add = ops.rowwise.add
        self._host_calls = ops.host_calls
        self._linears = [linear for _, linear in segments]
        self._ends = list(accumulate(width for width, _ in segments))
        self._sum_of_ranks = sum_of_ranks

    def __call__(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor:
        """x: (T, the rank's share), of `rows` -> (T, out)."""

        def product(index: int) -> Tensor:
            begin = self._ends[index - 1] if index else 0
            return self._linears[index](self._columns(x, begin, self._ends[index]), rows)

        own = sum_in_pairs(len(self._linears), product, self._add)
        return own if self._sum_of_ranks is None else self._sum_of_ranks(own)

    def _columns(self, x: Tensor, begin: int, end: int) -> Tensor:
        some = x[:, begin:end]
        if some.is_contiguous() or self._host_calls is None:
            return some.contiguous()
        # A copy of torch's would be none while a step is recorded.
        packed = self._host_calls.new(*some.shape, dtype=x.dtype)

        def copy() -> None:
            packed.copy_(some)

        self._host_calls.run(copy)
        return packed


def sum_in_pairs(
    count: int, part: Callable[[int], Tensor], add: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The sum of `count` parts.

    The first half is a power of two, so that what ranks have of as many segments is a part of it.
    add: adds its first argument to its second one in place, and returns that.
    """

    def of(first: int, num: int) -> Tensor:
        if num == 1:
            return part(first)
        half = 1 << (num - 1).bit_length() - 1
        left = of(first, half)
        return add(of(first + half, num - half), left)

    return of(0, count)
