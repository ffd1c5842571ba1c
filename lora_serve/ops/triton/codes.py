"""Weights as codes on a card: how they lie there, and the product that reads nothing else of them.

    y = sum over groups of scale * (codes . x) + offset * (sum of x)

Codes become x's dtype in registers, exactly. A group's product goes over its inputs in ascending
order into a sum of its own, which is scaled in float32 and added over ascending groups of a span of
SPAN inputs; spans are added in order. So a program may have one span or all, and gives the same
bits. Knows nothing of where rows come from or where outputs go.

    codes   (groups, out, bytes of a group)       8 bits: code + 128 of inputs 0, 1, …
                                                  4 bits: code + 8 of input j in the lower half of
                                                  byte j, of input group / 2 + j in the upper one
    scales, offsets (groups, out)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from lora_serve.ops.quantization import QuantizedWeight
from lora_serve.ops.triton.arithmetic import multiply
from lora_serve.ops.triton.launch import Constants, Machine
from lora_serve.ops.triton.linear import RESERVED_SHARED_BYTES, Tile

SPAN = 2048  # inputs; a matrix of a 7B model has 2 to 10 of them, for programs of their own
LEAST_GROUP_OF_4_BITS = 32  # half of a group is one step of a tensor core
MOST_AT_ONCE = 128  # inputs that a program multiplies between two turns of its loop
FEW_ROWS = 32  # of decode, whose programs are small so that all of a card reads codes


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A linear layer's weight as codes on the device, as the head of this file has them.

    scales: bfloat16 or float32; offsets: float32, or None where all are 0; bias: (out), of the
    model's dtype. in_features: without what fills the last group. quantize_activations: rows get
    codes of 8 bits, too.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bias: Tensor | None
    bits: int
    group: int
    in_features: int
    quantize_activations: bool

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-2]

    @property
    def out_features(self) -> int:
        return self.scales.shape[-1]


def pack_codes(
    weight: QuantizedWeight, bias: Tensor | None, device: torch.device, quantize_activations: bool
) -> PackedCodes:
    """Bring codes to the device in the kernels' order; the source is not kept."""
    form, (out_features, in_features) = weight.format, weight.codes.shape
    bits = 8 if form.group < LEAST_GROUP_OF_4_BITS else form.bits
    num_groups = -(-in_features // form.group)
    shape = (out_features, num_groups)
    assert weight.scales.shape == shape, f"scales {tuple(weight.scales.shape)}, not {shape}"
    filled = pad(weight.codes.detach().to(device), (0, num_groups * form.group - in_features))
    groups = (
        filled.view(out_features, num_groups, form.group).to(torch.int16) + (1 << bits - 1)
    ).to(torch.uint8)
    if bits == 4:
        low, high = groups.chunk(2, dim=2)
        groups = low | high << 4
    return PackedCodes(
        groups.transpose(0, 1).contiguous(),
        _by_group(weight.scales, device),
        None if weight.offsets is None else _by_group(weight.offsets, device),
        None if bias is None else bias.detach().to(device).contiguous(),
        bits,
        form.group,
        in_features,
        quantize_activations,
    )


def _by_group(numbers: Tensor, device: torch.device) -> Tensor:
    narrow = numbers.dtype == torch.bfloat16
    return numbers.detach().to(device, None if narrow else torch.float32).t().contiguous()


@triton.jit
def code_values(stored, BITS: tl.constexpr, dtype: tl.constexpr):
    """The codes that bytes below 2^BITS stand for: whole numbers, which the dtype holds.

    By the bits of 2^23 + stored: cards turn whole numbers into floats more slowly.
    """
    shifted = (stored.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (shifted - (8388608.0 + (1 << BITS - 1))).to(dtype)


@triton.jit
def group_product(
    x_rows,
    row_mask,
    codes_ptrs,
    out_mask,
    group,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    """Codes . x of one group: (OUTS, ROWS). codes_ptrs: (OUTS), where the group's bytes begin."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    total = tl.zeros((OUTS, ROWS), tl.float32)
    i = tl.arange(0, PIECE)
    if BITS == 4:
        stored = tl.load(codes_ptrs[:, None] + i[None, :], mask=out_mask[:, None], other=0)
    for piece in tl.static_range(GROUP // PIECE):
        if BITS == 8:
            bytes_of_piece = codes_ptrs[:, None] + (piece * PIECE + i)[None, :]
            codes = tl.load(bytes_of_piece, mask=out_mask[:, None], other=0)
        else:
            codes = (stored >> (4 * piece)) & 15
        k = group * GROUP + piece * PIECE + i
        mask = row_mask[None, :]
        if IN % GROUP != 0:
            mask &= (k < IN)[:, None]
        x = tl.load(x_rows[None, :] + k[:, None], mask=mask, other=0.0)
        total = multiply(code_values(codes, BITS, dtype), x, total)
    return total


@triton.jit
def codes_product(
    x_rows,
    of_groups_rows,
    row_mask,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    o,
    begin,
    end,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_AT_ONCE: tl.constexpr,
    GROUPS_OF_SPAN: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    """Outputs o (OUTS) of the rows (ROWS), over groups [begin, end): (OUTS, ROWS), float32.

    x_rows: where rows begin. of_groups_rows: where what each of them has for each group begins:
    the sum of its x where there are offsets, its scale where x are codes.
    """
    bytes_of_group: tl.constexpr = GROUP * BITS // 8
    out_mask = o < OUT
    total = tl.zeros((OUTS, ROWS), tl.float32)
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    for first in range(begin, end, GROUPS_AT_ONCE):
        for index in tl.static_range(GROUPS_AT_ONCE):
            group = first + index
            at = group.to(tl.int64) * OUT + o
            product = group_product(
                x_rows,
                row_mask,
                codes_ptr + at * bytes_of_group,
                out_mask,
                group,
                IN,
                BITS,
                GROUP,
                PIECE,
                ROWS,
                OUTS,
            )
            scale = tl.load(scales_ptr + at, mask=out_mask, other=0.0).to(tl.float32)[:, None]
            if HAS_OFFSETS or HAS_ROW_SCALES:
                of_rows = tl.load(of_groups_rows + group, mask=row_mask, other=0.0)[None, :]
            if HAS_ROW_SCALES:
                sums += product * (scale * of_rows)
            else:
                sums = tl.fma(product, scale.broadcast_to(OUTS, ROWS), sums)
            if HAS_OFFSETS:
                offset = tl.load(offsets_ptr + at, mask=out_mask, other=0.0)[:, None]
                sums = tl.fma(
                    offset.broadcast_to(OUTS, ROWS), of_rows.broadcast_to(OUTS, ROWS), sums
                )
        if (first + GROUPS_AT_ONCE) % GROUPS_OF_SPAN == 0:
            total += sums
            sums = tl.zeros((OUTS, ROWS), tl.float32)
    return total + sums


def product_constants(packed: PackedCodes) -> Constants:
    """What `codes_product` is told of a weight."""
    piece = packed.group // 2 if packed.bits == 4 else min(packed.group, MOST_AT_ONCE)
    spans = span_groups(packed)
    return {
        "IN": packed.in_features,
        "OUT": packed.out_features,
        "BITS": packed.bits,
        "GROUP": packed.group,
        "GROUPS": packed.num_groups,
        "GROUPS_AT_ONCE": _groups_at_once(packed),
        "GROUPS_OF_SPAN": spans,
        "PIECE": piece,
        "HAS_OFFSETS": packed.offsets is not None,
        "HAS_ROW_SCALES": packed.quantize_activations,
    }


def span_groups(packed: PackedCodes) -> int:
    """How many groups are summed before the next span begins.

    All, where rows are codes: the specification adds their groups one after the other.
    """
    return packed.num_groups if packed.quantize_activations else SPAN // packed.group


def _groups_at_once(packed: PackedCodes) -> int:
    """The most groups that divide all of them and a span."""
    return math.gcd(max(1, MOST_AT_ONCE // packed.group), packed.num_groups)


def tile_of_codes(dtype: torch.dtype, num_rows: int, packed: PackedCodes, machine: Machine) -> Tile:
    """Outputs are a tensor core's rows, since what it takes from registers are those.

    There are two tiles, for few rows and for many, so that two kernels are compiled for a weight.
    Compiled with 64 rows to a tile, some of those that get 32 here would spill registers.
    """
    if dtype == torch.float32:
        return Tile(rows=32, outs=64, in_step=packed.group, num_warps=8, num_stages=1)
    rows, outs, num_warps = FEW_ROWS, 64, 4
    if num_rows > FEW_ROWS:
        has_row_values = packed.offsets is not None or packed.quantize_activations
        has_room = machine.capability >= 90 and not has_row_values
        rows, outs, num_warps = (64 if has_room else 32), 128, 8
    inputs = _groups_at_once(packed) * packed.group
    stage_bytes = inputs * (outs * packed.bits // 8 + rows * dtype.itemsize)
    room = machine.shared_bytes // 2 - RESERVED_SHARED_BYTES  # two programs a multiprocessor
    return Tile(rows, outs, inputs, num_warps, max(1, min(4, room // stage_bytes)))
