"""Embedding, norms, activations, capped logits: every row by itself, in float32, rounded once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lora_serve.ops.reference.arithmetic import exponential, hyperbolic_tangent, row_sum


def embed(weight: Tensor, input_ids: Tensor, scale: float | None) -> Tensor:
    rows = weight[input_ids]
    return rows if scale is None else rows.to(torch.float32).mul_(scale).to(rows.dtype)


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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias."""
    wide = x.to(torch.float32)
    centred = wide - (row_sum(wide) / x.shape[-1])[..., None]
    variance = row_sum(centred * centred) / x.shape[-1]
    scale = 1.0 / (variance + eps).sqrt_()
    normed = centred.mul_(scale[..., None]).mul_(weight.to(torch.float32))
    return (normed if bias is None else normed.add_(bias.to(torch.float32))).to(x.dtype)


def add(x: Tensor, residual: Tensor) -> Tensor:
    return residual.add_(x)


def scale(x: Tensor, factor: float) -> Tensor:
    return x.copy_(x.to(torch.float32).mul_(factor))


def silu_and_mul(x: Tensor) -> Tensor:
    """Y = gate / (1 + e^-gate) * up."""
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    return (gate / exponential(-gate).add_(1.0)).mul_(up).to(x.dtype)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Y = gate / (1 + e^(-2 u)) * up, for (1 + tanh u) / 2 is 1 / (1 + e^(-2 u))."""
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    return _gelu_tanh(gate).mul_(up).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    return x.copy_(_gelu_tanh(x.to(torch.float32)))


def _gelu_tanh(gate: Tensor) -> Tensor:
    u = math.sqrt(2 / math.pi) * gate * (1.0 + 0.044715 * gate * gate)
    return gate / exponential(-2.0 * u).add_(1.0)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    return logits.copy_(hyperbolic_tangent(logits.to(torch.float32) / cap).mul_(cap))
