"""Weights as small whole numbers, and a scale for each group of them along a row.

    weight[n][k] ~ scale[n][k // G] * code[n][k] + offset[n][k // G]

Weights that are quantised here have no offsets. Those that a checkpoint stores as codes keep its
codes, scales and offsets. The one rule: which codes and scales a weight has is said here, by
elementwise torch, so that every backend serves the same quantised weights. Knows nothing of how a
backend keeps or multiplies them, nor of how it finds the same numbers faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

LEAST_GROUP = 16  # that kernels take
Empty = Callable[[Sequence[int], torch.dtype], Tensor]
WEIGHTS_AT_ONCE = 1 << 18  # temporaries of 1 MB stay in a cache, and are not new pages each time


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """Codes of `bits` in [least, most]; `group` of them share a scale."""

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
    """A weight as codes.

    codes: (N, K), int8. scales: (N, ceil(K / group)), bfloat16 where `quantize` chose them, else
    float32; any may be negative. offsets: of scales' shape, float32; None: all are 0.
    """

    format: CodeFormat
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def dequantized(self) -> Tensor:
        """(N, K), float32; exact without offsets and with scales in bfloat16."""
        values = self.codes.to(torch.float32) * self._of_values(self.scales)
        return values if self.offsets is None else values + self._of_values(self.offsets)

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """The weight whose rows `change` has reordered or chosen; it is asked for each tensor."""
        offsets = None if self.offsets is None else change(self.offsets)
        return replace(self, codes=change(self.codes), scales=change(self.scales), offsets=offsets)

    def has_columns(self, share: range) -> bool:
        """Whether these end with groups of a size that kernels take."""
        return math.gcd(self.format.group, share.start, share.stop) >= LEAST_GROUP

    def with_columns(self, share: range) -> QuantizedWeight:
        """Some of its columns, which it has, in groups that end with them."""
        group = math.gcd(self.format.group, share.start, share.stop)
        finer = replace(self.format, group=group)
        weight = self.in_format(finer, has_offsets=self.offsets is not None)
        groups = slice(share.start // group, share.stop // group)
        return replace(
            weight,
            codes=weight.codes[:, share.start : share.stop],
            scales=weight.scales[:, groups],
            offsets=None if weight.offsets is None else weight.offsets[:, groups],
        )

    def in_format(self, code_format: CodeFormat, *, has_offsets: bool) -> QuantizedWeight:
        """The same weight in wider codes, or in groups that are a part of this one's."""
        if code_format.group == self.format.group and has_offsets == (self.offsets is not None):
            return replace(self, format=code_format)
        times = self.format.group // code_format.group
        groups = -(-self.codes.shape[1] // code_format.group)
        scales = self.scales.repeat_interleave(times, dim=1)[:, :groups]
        offsets = torch.zeros_like(scales) if has_offsets else None
        if self.offsets is not None:
            offsets = self.offsets.repeat_interleave(times, dim=1)[:, :groups]
        return QuantizedWeight(code_format, self.codes, scales, offsets)

    def _of_values(self, numbers: Tensor) -> Tensor:
        width = self.codes.shape[1]
        group = min(self.format.group, width)  # a checkpoint may name any
        return numbers.to(torch.float32).repeat_interleave(group, dim=1)[:, :width]


def stacked(weights: Sequence[QuantizedWeight], empty: Empty | None = None) -> QuantizedWeight:
    """One weight with the rows of all of them, in a format that holds each exactly.

    empty: as of `rows_of_all`.
    """
    if len(weights) == 1:
        return weights[0]
    formats = [weight.format for weight in weights]
    shared = CodeFormat(
        name="+".join(dict.fromkeys(each.name for each in formats)),
        bits=max(each.bits for each in formats),
        group=math.gcd(*(each.group for each in formats)),
        least=min(each.least for each in formats),
        most=max(each.most for each in formats),
    )
    has_offsets = any(weight.offsets is not None for weight in weights)
    alike = [weight.in_format(shared, has_offsets=has_offsets) for weight in weights]
    offsets = [weight.offsets for weight in alike if weight.offsets is not None]
    return QuantizedWeight(
        shared,
        rows_of_all([weight.codes for weight in alike], empty),
        rows_of_all([weight.scales for weight in alike], empty),
        rows_of_all(offsets, empty) if has_offsets else None,
    )


def rows_of_all(matrices: Sequence[Tensor], empty: Empty | None = None) -> Tensor:
    """One matrix of the rows of all, which are of one width and dtype.

    empty: gives memory of the CPU for it; torch does if left out.
    """
    first = matrices[0]
    shape = sum(len(matrix) for matrix in matrices), first.shape[1]
    if first.is_meta:  # torch.cat would import for seconds what it needs for these
        return first.new_empty(shape)
    if empty is None or first.device.type != "cpu":
        return torch.cat(list(matrices))
    return torch.cat(list(matrices), out=empty(shape, first.dtype))


def quantize(weight: Tensor, code_format: CodeFormat) -> QuantizedWeight:
    """weight: (N, K), any float dtype, on any device.

    A group with an infinity or a NaN has the scale NaN.
    """
    rows, width = weight.shape
    groups = -(-width // code_format.group)
    codes = torch.empty(rows, width, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=weight.device)
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
