"""Root-mean-square norms, alone and fused with the residual's addition."""

from __future__ import annotations

from torch import Tensor

from lora_serve.ops.contract import Ops


class RMSNorm:
    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension of (T, H), or of each head of (T, heads, D)."""
        return self._ops.rowwise.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place; return the norm of the sum. Both (T, H)."""
        return self._ops.rowwise.add_rms_norm(x, residual, self._weight, self._eps)
