"""Weights as small whole numbers, and a scale for each group of them along a row.

    weight[n][k] ~ scale[n][k // G] * code[n][k]

The one rule: which codes and scales a weight has is said here, by elementwise torch, so that every
backend serves the same quantised weights. Knows nothing of how a backend keeps or multiplies them,
nor of how it finds the same numbers faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

WEIGHTS_AT_ONCE = 1 << 18  # temporaries of 1 MB stay in a cache, and are not new pages each time


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """Codes of `bits` in [least, most]; `group` of them share a scale, in bfloat16."""

    name: str
    bits: int
    group: int
    least: int
    most: int


# A group's largest weight becomes ±127.
INT8 = CodeFormat("int8", bits=8, group=128, least=-127, most=127)
# A group's largest weight becomes -8, whatever its sign, so that all 16 codes are of use.
INT4 = CodeFormat("int4", bits=4, group=32, least=-8, most=7)
FORMATS = {code_format.name: code_format for code_format in (INT8, INT4)}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """codes: (N, K), int8. scales: (N, ceil(K / group)), bfloat16; an int4 one may be negative."""

    format: CodeFormat
    codes: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """(N, K), float32, exactly: a code and a scale have at most 8 significant bits each."""
        scales = self.scales.to(torch.float32).repeat_interleave(self.format.group, dim=1)
        return self.codes.to(torch.float32) * scales[:, : self.codes.shape[1]]


def quantize(weight: Tensor, code_format: CodeFormat) -> QuantizedWeight:
    """weight: (N, K), any float dtype. A group with an infinity or a NaN has the scale NaN."""
    rows, width = weight.shape
    codes = torch.empty(rows, width, dtype=torch.int8)
    scales = torch.empty(rows, -(-width // code_format.group), dtype=torch.bfloat16)
    rows_at_once = max(1, WEIGHTS_AT_ONCE // width)
    for start in range(0, rows, rows_at_once):
        part = slice(start, start + rows_at_once)
        codes[part], scales[part] = _quantize_rows(weight[part], code_format)
    return QuantizedWeight(code_format, codes, scales)


def _quantize_rows(weight: Tensor, code_format: CodeFormat) -> tuple[Tensor, Tensor]:
    width, group = weight.shape[1], code_format.group
    wide = pad(weight.to(torch.float32), (0, -width % group))
    groups = wide.unflatten(1, (-(-width // group), group))
    scales = _scales(groups, code_format)
    steps = scales.to(torch.float32)[..., None]
    codes = torch.where(steps == 0, 0.0, groups / steps).round_()
    codes = codes.clamp_(code_format.least, code_format.most).nan_to_num_(0.0)
    return codes.to(torch.int8).flatten(1)[:, :width], scales


def _scales(groups: Tensor, code_format: CodeFormat) -> Tensor:
    low, high = groups.aminmax(dim=-1)
    if code_format.least == -code_format.most:
        largest = torch.maximum(-low, high) / code_format.most
    else:
        largest = torch.where(-low > high, low, high) / code_format.least
    return torch.where(largest.isfinite(), largest, torch.nan).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How linear layers are computed: codes of the weights, and whether activations get codes too.

    Activations get 8 bits, each row by itself, a scale for each group that the weights have:

        scale = max |x| / 127        code = round(x * (127 / max |x|)), ties to even

    A group whose maximum is below 2^-100 counts as zero; one with an infinity or NaN gives NaN.
    """

    weights: CodeFormat
    activations: bool = False

    def __str__(self) -> str:
        text = f"{self.weights.name}-group{self.weights.group}"
        return f"{text}-activations8" if self.activations else text
