"""Norms, alone and together with the residual's addition."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lora_serve.layers.gather import Gather
from lora_serve.layers.host_made import host_made
from lora_serve.ops.contract import Ops


class Norm(Protocol):
    """What stands before a part of a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension of (T, H)."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place; return the norm of the sum. Both (T, H)."""


class RMSNorm:
    """Root-mean-square norm. weight: (H)."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension of (T, H), or of each head of (T, heads, D)."""
        return self._ops.rowwise.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._ops.rowwise.add_rms_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """weight, bias: (H); bias may be None."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._ops = ops
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rowwise.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(self._ops.rowwise.add(x, residual))


class NoNorm:
    """Stands where a family has no norm. What it returns is what it was given, no copy."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._ops.rowwise.add(x, residual)


class RMSNormOfAllHeads:
    """One root-mean-square norm over all heads of a token. weight: (heads * D).

    gather: puts the heads of all ranks together, where each has its share.
    """

    def __init__(self, ops: Ops, weight: Tensor, eps: float, gather: Gather | None = None) -> None:
        self._norm = RMSNorm(ops, weight, eps)
        self._gather = gather

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, heads, D), a token's heads side by side -> the same."""
        if self._gather is None:
            return self._norm(x.view(x.shape[0], 1, -1)).view(x.shape)
        rows = self._norm(self._gather(x.view(x.shape[0], -1)))
        return self._gather.own(rows).view(x.shape)


class LayerNormOfEachHead:
    """Layer norm of each head of a token by itself, with weights of its own. weight: (heads, D).

    In float32, and rounded once.
    """

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self._weight = weight.to(torch.float32)
        self._ones = torch.ones_like(self._weight[0])
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, heads, D) -> the same."""
        num_rows, size = x.shape[0] * x.shape[1], x.shape[2]
        rows = host_made(
            self._ops, (num_rows, size), torch.float32, lambda to: to.view(x.shape).copy_(x)
        )
        normed = self._ops.rowwise.layer_norm(rows, self._ones, None, self._eps).view(x.shape)
        return host_made(self._ops, x.shape, x.dtype, lambda to: to.copy_(normed * self._weight))
