"""Linear layers, over weights as they are and over quantised ones (ops/quantization.py).

T tokens, K inputs, N outputs. With activations in full precision, a quantised layer is that of the
dequantised weight, which is exact in float32. With activations in 8 bits, sums within a group are
of whole numbers below 2^24 and so exact in any order; the native kernels give the same bits as
`integer_linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lora_serve.ops.quantization import CodeFormat, QuantizedWeight, quantize
from lora_serve.ops.reference.arithmetic import PANEL_COLUMNS, product, rows_may_share_a_tile
from lora_serve.ops.reference.rowwise import gelu_tanh_and_mul, silu_and_mul

MOST = torch.tensor(127.0)  # a tensor: torch takes a number's quotient by the reciprocal
LEAST_MAGNITUDE = 2.0**-100


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """weight: (out, in); bias: (out) or None; both float32, which holds any dtype's values."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """codes: (N, K); scales: (N, groups); bias: (N) or None; all float32."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    group: int


Packed = PackedWeight | PackedCodes


def pack_linear(weight: Tensor, bias: Tensor | None) -> Packed:
    packed = weight.to(torch.float32).contiguous()
    out_features, in_features = packed.shape
    # Try this shape's products now rather than in the first request.
    rows_may_share_a_tile(min(out_features, PANEL_COLUMNS), in_features, torch.get_num_threads())
    return PackedWeight(packed, None if bias is None else bias.to(torch.float32))


def pack_rows(weight: Tensor) -> Packed:
    return pack_linear(weight, None)


def pack_quantized(
    weight: Tensor, code_format: CodeFormat, bias: Tensor | None, quantize_activations: bool
) -> Packed:
    quantized = quantize(weight, code_format)
    if not quantize_activations:
        return pack_linear(quantized.dequantized(), bias)
    return PackedCodes(
        quantized.codes.to(torch.float32),
        quantized.scales.to(torch.float32),
        None if bias is None else bias.to(torch.float32),
        code_format.group,
    )


def pack_codes(weight: QuantizedWeight, bias: Tensor | None) -> Packed:
    return pack_linear(weight.dequantized(), bias)


def linear(x: Tensor, packed: Packed) -> Tensor:
    if isinstance(packed, PackedCodes):
        return integer_linear(x, packed)
    y = product(x, packed.weight)
    if packed.bias is not None:
        y += packed.bias
    return y.to(x.dtype)


def fuse_gated(packed: Packed, activation: str) -> Callable[[Tensor], Tensor]:
    act_and_mul = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}[activation]
    return lambda x: act_and_mul(linear(x, packed))


def integer_linear(x: Tensor, packed: PackedCodes) -> Tensor:
    """Y = bias + sum over groups of (x codes @ w codes.T) * (w scale * x scale), in order."""
    codes, scales = quantize_rows(x, packed.group)
    y = torch.zeros(x.shape[0], packed.codes.shape[0])
    for index in range(scales.shape[1]):
        span = slice(index * packed.group, (index + 1) * packed.group)
        whole = codes[:, span] @ packed.codes[:, span].t()
        y += whole * (packed.scales[:, index] * scales[:, index, None])
    if packed.bias is not None:
        y += packed.bias
    return y.to(x.dtype)


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes (T, K) and scales (T, groups), float32, as `Quantization` says."""
    width = x.shape[1]
    groups = pad(x.to(torch.float32), (0, -width % group)).unflatten(1, (-(-width // group), group))
    largest = groups.abs().amax(dim=-1)
    usable = largest.isfinite() & (largest >= LEAST_MAGNITUDE)
    codes = (groups * (MOST / largest)[..., None]).round_()
    codes = torch.where(usable[..., None], codes, 0.0)
    scales = torch.where(largest.isfinite(), largest / MOST, torch.nan)
    return codes.flatten(1)[:, :width], scales
