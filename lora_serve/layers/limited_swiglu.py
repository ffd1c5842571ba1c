"""The activation of gpt-oss's experts: gate and up are limited, and up gets 1 more.

    g' = min(g, limit)   u' = min(max(u, -limit), limit)   y = g' sigmoid(alpha g') (u' + 1)

That is silu(alpha g') (u' + 1) / alpha, so it is made of `silu_and_mul` in float32, and rounded
once. What stands around that kernel is elementwise: no bit depends on where a row lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.layers.host_made import host_made
from lora_serve.ops.contract import Ops


@dataclass(frozen=True, slots=True)
class SwiGLULimits:
    """The numbers of the formula, both above 0."""

    alpha: float
    limit: float


class LimitedSwiGLU:
    """(T, 2 I), the gate's first -> (T, I)."""

    def __init__(self, ops: Ops, limits: SwiGLULimits) -> None:
        self._ops = ops
        self._limits = limits

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        limited = host_made(self._ops, (rows, width), torch.float32, lambda to: self._limit(x, to))
        y = self._ops.rowwise.silu_and_mul(limited)
        return host_made(self._ops, (rows, width // 2), x.dtype, lambda to: to.copy_(y))

    def _limit(self, x: Tensor, to: Tensor) -> Tensor:
        alpha, limit = self._limits.alpha, self._limits.limit
        gate, up = to.copy_(x).chunk(2, dim=-1)
        gate.clamp_(max=limit).mul_(alpha)
        up.clamp_(-limit, limit).add_(1.0).mul_(1.0 / alpha)
        return to
