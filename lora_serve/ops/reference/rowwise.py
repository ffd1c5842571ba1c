"""Norms and activation: every row by itself, in float32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_serve.ops.reference.arithmetic import exponential, row_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Y = x / sqrt(mean(x^2) + eps) * weight."""
    wide = x.to(torch.float32)
    mean_square = row_sum(wide * wide) / x.shape[-1]
    scale = 1.0 / (mean_square + eps).sqrt_()
    return (wide * scale[..., None]).mul_(weight.to(torch.float32)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    # One addition of two values of a dtype rounds the same in it as from float32.
    residual += x
    return rms_norm(residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """Y = gate / (1 + e^-gate) * up."""
    half = x.shape[-1] // 2
    gate = x[..., :half].to(torch.float32)
    up = x[..., half:].to(torch.float32)
    return (gate / exponential(-gate).add_(1.0)).mul_(up).to(x.dtype)
