"""What adapters add to the linear layers of experts that rows choose.

Pairs of a row and its expert stand in no order that kernels of deltas know. So those of an adapter
and an expert are brought side by side, where the deltas of linear layers are added to them: a pair
gets the bits that it gets alone. Kernels of a device bring them there (`Ops.plan_pairs`); elsewhere
the host does, which must know which experts were chosen. Steps with such an adapter run without a
recorded graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lora_serve.ops.contract import ChosenExperts, LoRAPlan, Ops, PackedAdapter

# An adapter's deltas of each expert's linear layers, by the expert's number.
ExpertAdapters = Sequence[PackedAdapter]
# (start, end, adapters), disjoint ranges of rows in ascending order.
ExpertChanges = Sequence[tuple[int, int, ExpertAdapters]]


class ExpertDeltas:
    """The deltas of one layer's experts. changes: at least one. chosen: of all rows, (T, K)."""

    def __init__(self, ops: Ops, changes: ExpertChanges, chosen: ChosenExperts) -> None:
        plan = ops.plan_pairs or partial(_plan_on_host, ops)
        self._ops = ops
        self._pairs, self._plan = plan(changes, chosen)
        self._rows = self._pairs // chosen.ids.shape[1]

    def add(self, y: Tensor, x: Tensor, linear_index: int) -> None:
        """Add the deltas of x to y (T * K, out), in place.

        x: (T, in), where all pairs of a row read it; or (T * K, in). linear_index: of the layer,
            among those of an expert.
        """
        rows = self._pairs if len(x) == len(y) else self._rows
        changed = y.index_select(0, self._pairs)
        self._ops.adapters.lora(changed, x.index_select(0, rows), self._plan, linear_index)
        y.index_copy_(0, self._pairs, changed)


def _plan_on_host(
    ops: Ops, changes: ExpertChanges, chosen: ChosenExperts
) -> tuple[Tensor, LoRAPlan]:
    """What `PlanPairs` says: it is the specification of others."""
    ids, num_chosen = chosen.ids.cpu().numpy(), chosen.ids.shape[1]
    pairs = []
    segments: list[tuple[int, int, PackedAdapter]] = []
    end = 0
    for start, stop, adapters in changes:
        experts = ids[start:stop].reshape(-1)
        pairs.append(start * num_chosen + np.argsort(experts, kind="stable"))
        for expert, count in zip(*np.unique(experts, return_counts=True), strict=True):
            segments.append((end, end + int(count), adapters[expert]))
            end += int(count)
    order = torch.from_numpy(np.concatenate(pairs)).to(ops.device)
    return order, ops.adapters.plan_lora(segments, end)
