"""Mixtures of experts, one expert after the other. T rows, K experts a row, E experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.ops.contract import ChosenExperts
from lora_serve.ops.reference import linear as linears
from lora_serve.ops.reference.arithmetic import exponential, row_sum

Packed = tuple[linears.Packed, ...]


def pack_gate(weight: Tensor, bias: Tensor | None = None) -> linears.Packed:
    return linears.pack_linear(weight, bias)


def gate(x: Tensor, packed: linears.Packed) -> Tensor:
    return linears.linear(x, packed)


def choose(logits: Tensor, num_chosen: int, among_chosen: bool) -> ChosenExperts:
    wide = logits.to(torch.float32)
    ordered, order = wide.sort(dim=-1, descending=True, stable=True)
    ids = order[:, :num_chosen].to(torch.int32)
    largest = ordered[:, :1]
    chosen = exponential(ordered[:, :num_chosen] - largest)
    total = row_sum(chosen if among_chosen else exponential(wide - largest))
    return ChosenExperts(ids.contiguous(), (chosen / total[:, None]).contiguous())


def pack_experts(experts: Sequence[linears.Packed]) -> Packed:
    return tuple(experts)


def linear(x: Tensor, packed: Packed, chosen: ChosenExperts) -> Tensor:
    ids = chosen.ids.flatten()
    pairs_per_row = len(ids) // max(1, len(x))
    first = packed[0]
    weight = first.weight if isinstance(first, linears.PackedWeight) else first.codes
    y = x.new_empty(len(ids), len(weight))
    for expert in ids.unique().tolist():
        pairs = (ids == expert).nonzero()[:, 0]
        y[pairs] = linears.linear(x[pairs // pairs_per_row], packed[expert])
    return y


def combine(x: Tensor, chosen: ChosenExperts) -> Tensor:
    pairs = x.view(*chosen.ids.shape, -1).to(torch.float32)
    total = torch.zeros_like(pairs[:, 0])
    for j in range(pairs.shape[1]):
        total += pairs[:, j] * chosen.weights[:, j, None]
    return total.to(x.dtype)


def add_gated(x: Tensor, logits: Tensor, total: Tensor) -> Tensor:
    share = 1.0 / exponential(-logits.to(torch.float32)).add_(1.0)
    return total.copy_(total.to(torch.float32) + x.to(torch.float32) * share)
