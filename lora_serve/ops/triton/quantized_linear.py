"""Linear layers over codes, whose rows do not depend on the batch: codes.py has the order of sums.

Few rows: a program has one span of the inputs, so that the whole card reads codes, and
`fold_kernel` adds the spans in order. Many: a program has them all. Both give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_serve.ops.triton.arithmetic import rounded
from lora_serve.ops.triton.codes import (
    FEW_ROWS,
    PackedCodes,
    codes_product,
    product_constants,
    span_groups,
    tile_of_codes,
)
from lora_serve.ops.triton.group_rows import group_sums_launch, quantize_rows_launch
from lora_serve.ops.triton.launch import Launch, Machine, kernel
from lora_serve.ops.triton.linear import ROW_BLOCKS_TOGETHER
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels

FOLDED = 256  # outputs of a row that a program of `fold_kernel` has


@kernel()
def quantized_linear_kernel(
    x_ptr,
    of_groups_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_AT_ONCE: tl.constexpr,
    GROUPS_OF_SPAN: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNIT_SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # y (UNIT_SPANS, T, OUT): of one span each, float32; or of all of them together
    row_blocks = tl.cdiv(num_rows, ROWS)
    out_blocks: tl.constexpr = (OUT + OUTS - 1) // OUTS
    program = tl.program_id(0)
    span = tl.program_id(1)
    band = program // (TOGETHER * out_blocks)
    band_height = tl.minimum(row_blocks - band * TOGETHER, TOGETHER)
    within = program % (TOGETHER * out_blocks)
    row = ((band * TOGETHER + within % band_height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    o = within // band_height * OUTS + tl.arange(0, OUTS)
    begin = 0
    end = GROUPS
    if UNIT_SPANS > 1:
        begin = span * GROUPS_OF_SPAN
        end = tl.minimum(GROUPS, begin + GROUPS_OF_SPAN)
    wait_for_earlier_kernels(OVERLAPS)
    total = codes_product(
        x_ptr + row * IN,
        of_groups_ptr + row * GROUPS,
        row < num_rows,
        codes_ptr,
        scales_ptr,
        offsets_ptr,
        o,
        begin,
        end,
        IN,
        OUT,
        BITS,
        GROUP,
        GROUPS_AT_ONCE,
        GROUPS_OF_SPAN,
        PIECE,
        HAS_OFFSETS,
        HAS_ROW_SCALES,
        ROWS,
        OUTS,
    )
    if HAS_BIAS:
        total += tl.load(bias_ptr + o, mask=o < OUT, other=0.0).to(tl.float32)[:, None]
    to = y_ptr + (span.to(tl.int64) * num_rows + row)[None, :] * OUT + o[:, None]
    y_mask = (row < num_rows)[None, :] & (o < OUT)[:, None]
    tl.store(to, rounded(total, y_ptr.dtype.element_ty), mask=y_mask)


@kernel()
def fold_kernel(
    parts_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    SPANS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # y (T, OUT) = bias + the sum of parts (SPANS, T, OUT), in their order
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    wait_for_earlier_kernels(OVERLAPS)
    for span in tl.static_range(SPANS):
        at = (span * num_rows + row) * OUT + o
        total += tl.load(parts_ptr + at, mask=o < OUT, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + o, mask=o < OUT, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * OUT + o, rounded(total, y_ptr.dtype.element_ty), mask=o < OUT)


def quantized_linear_launches(
    x: Tensor, packed: PackedCodes, y: Tensor, machine: Machine
) -> list[Launch]:
    """The launches that compute y (T, out) from x (T, in), both contiguous, in their order."""
    x, of_groups, launches = rows_of_groups(x, packed, machine)
    num_rows = len(x)
    tile = tile_of_codes(x.dtype, num_rows, packed, machine)
    out_blocks = triton.cdiv(packed.out_features, tile.outs)
    num_spans = triton.cdiv(packed.num_groups, span_groups(packed))
    # A card that all outputs fill needs no more programs.
    is_apart = num_rows <= FEW_ROWS and out_blocks < 4 * machine.num_multiprocessors
    unit_spans = num_spans if is_apart else 1
    parts = y
    if unit_spans > 1:
        parts = y.new_empty((unit_spans, *y.shape), dtype=torch.float32)
    product = Launch(
        quantized_linear_kernel,
        (triton.cdiv(num_rows, tile.rows) * out_blocks, unit_spans),
        {
            "x_ptr": x,
            "of_groups_ptr": of_groups,
            **weight_arguments(packed),
            "y_ptr": parts,
            "num_rows": num_rows,
        },
        {
            **product_constants(packed),
            "HAS_BIAS": packed.bias is not None and unit_spans == 1,
            "UNIT_SPANS": unit_spans,
            "ROWS": tile.rows,
            "OUTS": tile.outs,
            "TOGETHER": ROW_BLOCKS_TOGETHER,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    launches.append(product)
    if unit_spans > 1:
        launches.append(_fold_launch(parts, packed, y, machine))
    return launches


def weight_arguments(packed: PackedCodes) -> dict[str, Tensor]:
    """The arguments of kernels that hold a weight; one that it has not got is another's."""
    return {
        "codes_ptr": packed.codes,
        "scales_ptr": packed.scales,
        "offsets_ptr": packed.scales if packed.offsets is None else packed.offsets,
        "bias_ptr": packed.scales if packed.bias is None else packed.bias,
    }


def rows_of_groups(
    x: Tensor, packed: PackedCodes, machine: Machine
) -> tuple[Tensor, Tensor, list[Launch]]:
    """The rows as the product takes them, what they have for each group, and what makes both."""
    assert x.shape[1] == packed.in_features, f"x has {x.shape[1]}, weight {packed.in_features}"
    shape = (len(x), packed.num_groups)
    if packed.quantize_activations:
        codes = torch.empty_like(x, dtype=torch.bfloat16)
        scales = x.new_empty(shape, dtype=torch.float32)
        return codes, scales, [quantize_rows_launch(x, codes, scales, packed.group, machine)]
    if packed.offsets is not None:
        sums = x.new_empty(shape, dtype=torch.float32)
        return x, sums, [group_sums_launch(x, sums, packed.group, machine)]
    return x, packed.scales, []


def _fold_launch(parts: Tensor, packed: PackedCodes, y: Tensor, machine: Machine) -> Launch:
    num_rows, out_features = y.shape
    return Launch(
        fold_kernel,
        (num_rows, triton.cdiv(out_features, FOLDED)),
        {
            "parts_ptr": parts,
            "bias_ptr": y if packed.bias is None else packed.bias,
            "y_ptr": y,
            "num_rows": num_rows,
        },
        {
            "OUT": out_features,
            "WIDTH": FOLDED,
            "SPANS": len(parts),
            "HAS_BIAS": packed.bias is not None,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=4,
    )
