"""Low-rank deltas of linear layers. T tokens, R rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.ops.contract import LoRAPart
from lora_serve.ops.reference.arithmetic import product

# Of each linear layer the parts, in float32.
Adapter = tuple[tuple[LoRAPart, ...], ...]


@dataclass(frozen=True, slots=True)
class ReferenceLoRAPlan:
    """Row ranges and, for each linear layer, the parts that change those rows."""

    segments: tuple[tuple[int, int, Adapter], ...]


def pack_adapter(linears: Sequence[Sequence[LoRAPart]]) -> Adapter:
    return tuple(tuple(_widen(part) for part in parts) for parts in linears)


def _widen(part: LoRAPart) -> LoRAPart:
    a = part.a.to(torch.float32).contiguous()
    b = part.b.to(torch.float32).contiguous()
    return LoRAPart(a, b, part.scale, part.out_start)


def plan_lora(segments: Sequence[tuple[int, int, Adapter]], num_tokens: int) -> ReferenceLoRAPlan:
    ends = [0] + [end for _, end, _ in segments]
    for previous_end, (start, end, _) in zip(ends, segments, strict=False):
        assert previous_end <= start < end <= num_tokens, f"segment {start}:{end} of {num_tokens}"
    return ReferenceLoRAPlan(tuple(segments))


def lora(y: Tensor, x: Tensor, plan: ReferenceLoRAPlan, linear_index: int) -> None:
    for start, end, linears in plan.segments:
        for part in linears[linear_index]:
            delta = product(product(x[start:end], part.a), part.b).mul_(part.scale)
            target = y[start:end, part.out_start : part.out_start + part.b.shape[0]]
            target.copy_(delta.add_(target))
