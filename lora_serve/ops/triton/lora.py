"""Low-rank deltas of many adapters of mixed ranks, in two launches for a whole linear layer.

    h = x a^T      y += scale h b^T      T tokens, r rank; h stays float32, y is rounded once

Inputs are summed in spans of IN_SPAN, and the spans' sums added in order: by one program each when
rows are few (then `expand_kernel` adds them), by one program for all when they are many: the same
bits. Each product has TILE_ROWS rows, used or not, so that all take one tensor core instruction: a
small one, since many a tile holds a single row, and long segments are bound by memory anyway.

Source: "shrink" and "expand" of SGMV, Chen et al. 2023, arxiv.org/abs/2310.18547.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32

from lora_serve.ops.triton.arithmetic import multiply, multiply_wide, rounded
from lora_serve.ops.triton.launch import Arguments, Constants, Launch, Machine, kernel
from lora_serve.ops.triton.lora_plan import (
    FIRST_PART_WORD,
    HEADER_WORDS,
    LAYER_WORDS,
    MAX_PARTS,
    PART_WORDS,
    RANK_STEP,
    TILE_ROWS,
    TILE_WORDS,
    LoRAPlan,
)
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels

IN_SPAN = 1024
IN_STEP = 128
OUT_BLOCK = 256  # 8 KB of b for 16 ranks, so that its bytes count and not the way to its address
RANK_BLOCK = 16  # of expand: ranks are summed in such steps
# With more tiles than this, programs for spans would only add traffic: the card is full.
MAX_TILES_APART = 256
RESERVED_COLUMN_UNITS = 12  # at most: q, k and v of rank 64, 16 columns each
PROGRAMS_PER_MULTIPROCESSOR = 4  # what registers hold of the larger kernel


@triton.jit
def whole_steps(hidden_width, span_stride, RANK_STEP: tl.constexpr):
    """Tell the compiler: then hidden is read and written 16 bytes at a time."""
    return tl.multiple_of(hidden_width, RANK_STEP), tl.multiple_of(span_stride, RANK_STEP)


@kernel()
def shrink_kernel(
    x_ptr,
    hidden_ptr,
    plan_ptr,
    layer_start,
    span_stride,
    hidden_width,
    column_units,
    IN: tl.constexpr,
    IN_SPAN: tl.constexpr,
    IN_STEP: tl.constexpr,
    UNIT_SPANS: tl.constexpr,
    SPANS_OF_UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK_STEP: tl.constexpr,
    HEADER_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # hidden[span, t, c] = sum of x[t, i] a[c, i] over the span's i, for all parts' columns c
    # x (T, IN); hidden (UNIT_SPANS, T, hidden_width), float32, of SPANS_OF_UNIT spans each
    # layer_start: where this linear layer begins in an adapter's table
    # One unit: a tile's rows, SPANS_OF_UNIT spans, each column_units-th block of COLUMNS
    hidden_width, span_stride = whole_steps(hidden_width, span_stride, RANK_STEP)
    units = UNIT_SPANS * column_units
    num_units = tl.load(plan_ptr).to(tl.int32) * units
    row = tl.arange(0, ROWS)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        tile_ptr = plan_ptr + HEADER_WORDS + unit // units * TILE_WORDS
        layer_ptr = tl.load(tile_ptr).to(plan_ptr.dtype) + layer_start
        tile_row = tl.load(tile_ptr + 1)
        num_rows = tl.load(tile_ptr + 2).to(tl.int32)
        a_ptr = tl.multiple_of(tl.load(layer_ptr).to(x_ptr.dtype), 16)
        num_columns = tl.load(layer_ptr + 1).to(tl.int32)
        wait_for_earlier_kernels(OVERLAPS)
        unit_span = unit // column_units % UNIT_SPANS
        begin = unit_span * (SPANS_OF_UNIT * IN_SPAN)
        end = tl.minimum(IN, begin + SPANS_OF_UNIT * IN_SPAN)
        x_rows = x_ptr + (tile_row + row)[:, None] * IN
        first_column = unit % column_units * COLUMNS
        for block in range(first_column, num_columns, column_units * COLUMNS):
            column = block + tl.arange(0, COLUMNS)
            a_rows = a_ptr + column[None, :].to(tl.int64) * IN
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for first in range(begin, end, IN_STEP):
                i = first + tl.arange(0, IN_STEP)
                x_mask = (row < num_rows)[:, None]
                a_mask = (column < num_columns)[None, :]
                if IN % IN_STEP != 0:
                    x_mask &= (i < IN)[None, :]
                    a_mask &= (i < IN)[:, None]
                x = tl.load(x_rows + i[None, :], mask=x_mask, other=0.0)
                a = tl.load(a_rows + i[:, None], mask=a_mask, other=0.0)
                sums = multiply(x, a, sums)
                if SPANS_OF_UNIT > 1 and (first + IN_STEP) % IN_SPAN == 0:
                    total += sums
                    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            total += sums
            to = unit_span * span_stride + (tile_row + row) * hidden_width
            to_mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
            tl.store(hidden_ptr + to[:, None] + column[None, :], total, mask=to_mask)
    wait_for_earlier_kernels(OVERLAPS)  # without a unit, too


@triton.jit
def find_part(
    parts_ptr,
    block,
    OUT_BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PART_WORDS: tl.constexpr,
):
    """The part that a block of a layer's outputs falls in, or -1, and which of the part's it is."""
    part = -1
    part_block = 0
    for candidate in tl.static_range(MAX_PARTS):
        # No outputs where the adapter has no such part.
        num_out = tl.load(parts_ptr + candidate * PART_WORDS + 2).to(tl.int32)
        num_blocks = tl.cdiv(num_out, OUT_BLOCK)
        is_here = (block >= 0) & (block < num_blocks)
        part = tl.where(is_here, candidate, part)
        part_block = tl.where(is_here, block, part_block)
        block -= num_blocks
    return part, part_block


@kernel()
def expand_kernel(
    y_ptr,
    hidden_ptr,
    plan_ptr,
    layer_start,
    span_stride,
    hidden_width,
    OUT: tl.constexpr,
    OUT_UNITS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    UNIT_SPANS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    HEADER_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    FIRST_PART_WORD: tl.constexpr,
    PART_WORDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # y[t, first output of part + o] += scale * sum of hidden[t, r] b[o, r]
    # y (T, OUT) and b of one dtype; hidden (UNIT_SPANS, T, hidden_width), float32
    # One unit: a tile's rows, and OUT_BLOCK outputs of the part that the unit falls in
    hidden_width, span_stride = whole_steps(hidden_width, span_stride, RANK_STEP)
    num_units = tl.load(plan_ptr).to(tl.int32) * OUT_UNITS
    row = tl.arange(0, ROWS)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        tile_ptr = plan_ptr + HEADER_WORDS + unit // OUT_UNITS * TILE_WORDS
        parts_ptr = tl.load(tile_ptr).to(plan_ptr.dtype) + layer_start + FIRST_PART_WORD
        tile_row = tl.load(tile_ptr + 1)
        num_rows = tl.load(tile_ptr + 2).to(tl.int32)
        part, part_block = find_part(parts_ptr, unit % OUT_UNITS, OUT_BLOCK, MAX_PARTS, PART_WORDS)
        if part >= 0:
            part_ptr = parts_ptr + part * PART_WORDS
            b_ptr = tl.multiple_of(tl.load(part_ptr).to(y_ptr.dtype), 16)
            rank = tl.multiple_of(tl.load(part_ptr + 1).to(tl.int32), RANK_STEP)
            num_out = tl.load(part_ptr + 2).to(tl.int32)
            first_out = tl.load(part_ptr + 3)
            first_column = tl.load(part_ptr + 4)
            scale = tl.load(part_ptr + 5).to(tl.int32).to(tl.float32, bitcast=True)
            o = part_block * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
            b_rows = b_ptr + o[None, :].to(tl.int64) * rank
            hidden_rows = hidden_ptr + ((tile_row + row) * hidden_width + first_column)[:, None]
            delta = tl.zeros((ROWS, OUT_BLOCK), tl.float32)
            for first in range(0, rank, RANK_BLOCK):
                r = first + tl.arange(0, RANK_BLOCK)
                b_mask = (o < num_out)[None, :] & (r < rank)[:, None]
                b = tl.load(b_rows + r[:, None], mask=b_mask, other=0.0)
                wait_for_earlier_kernels(OVERLAPS)
                hidden_mask = (row < num_rows)[:, None] & (r < rank)[None, :]
                hidden = tl.zeros((ROWS, RANK_BLOCK), tl.float32)
                for span in tl.static_range(UNIT_SPANS):  # all on their way at once
                    hidden_ptrs = hidden_rows + (span * span_stride + r)[None, :]
                    hidden += tl.load(hidden_ptrs, mask=hidden_mask, other=0.0)
                delta = multiply_wide(hidden, b, delta)
            # It has waited: no rank is 0. But that is not to be seen from the code.
            wait_for_earlier_kernels(OVERLAPS)
            y_ptrs = y_ptr + ((tile_row + row) * OUT + first_out)[:, None] + o[None, :]
            y_mask = (row < num_rows)[:, None] & (o < num_out)[None, :]
            y = tl.fma(delta, scale, tl.load(y_ptrs, mask=y_mask, other=0.0).to(tl.float32))
            tl.store(y_ptrs, rounded(y, y_ptr.dtype.element_ty), mask=y_mask)
    wait_for_earlier_kernels(OVERLAPS)  # without a unit, too


def lora_launches(
    y: Tensor, x: Tensor, plan: LoRAPlan, linear_index: int, machine: Machine
) -> list[Launch]:
    """Shrink, then expand: of linear layer `linear_index`. y (T, out) and x (T, in) contiguous."""
    width = plan.columns_of(linear_index)
    if width == 0:
        return []
    num_rows = x.shape[0]
    unit_spans = triton.cdiv(x.shape[1], IN_SPAN) if _is_apart(plan) else 1
    arguments: Arguments = {
        "hidden_ptr": x.new_empty((unit_spans, num_rows, width), dtype=float32),
        "plan_ptr": plan.words,
        "layer_start": linear_index * LAYER_WORDS,
        "span_stride": num_rows * width,
        "hidden_width": width,
    }
    shared: Constants = {
        "UNIT_SPANS": unit_spans,
        "ROWS": TILE_ROWS,
        "RANK_STEP": RANK_STEP,
        "HEADER_WORDS": HEADER_WORDS,
        "TILE_WORDS": TILE_WORDS,
        "OVERLAPS": machine.overlaps_launches,
    }
    return [
        _shrink_launch(x, width, arguments, shared, plan, machine),
        _expand_launch(y, arguments, shared, plan, machine),
    ]


def _is_apart(plan: LoRAPlan) -> bool:
    """Whether a program shrinks one span of the inputs, or all of them for more columns."""
    return plan.is_reserved or plan.num_tiles <= MAX_TILES_APART


def _shrink_launch(
    x: Tensor,
    width: int,
    arguments: Arguments,
    shared: Constants,
    plan: LoRAPlan,
    machine: Machine,
) -> Launch:
    in_features, unit_spans = x.shape[1], shared["UNIT_SPANS"]
    columns = 16 if _is_apart(plan) else 64
    column_units = triton.cdiv(width, columns)
    if plan.is_reserved:
        column_units = _reserved_column_units(plan.num_tiles * unit_spans, machine)
    return Launch(
        shrink_kernel,
        (_num_programs(plan, unit_spans * column_units, machine),),
        {**arguments, "column_units": column_units, "x_ptr": x},
        {
            **shared,
            "IN": in_features,
            "IN_SPAN": IN_SPAN,
            "IN_STEP": IN_STEP,
            "SPANS_OF_UNIT": triton.cdiv(triton.cdiv(in_features, IN_SPAN), unit_spans),
            "COLUMNS": columns,
        },
        num_warps=4,
        num_stages=4,
    )


def _expand_launch(
    y: Tensor, arguments: Arguments, shared: Constants, plan: LoRAPlan, machine: Machine
) -> Launch:
    out_units = triton.cdiv(y.shape[1], OUT_BLOCK) + MAX_PARTS - 1
    return Launch(
        expand_kernel,
        (_num_programs(plan, out_units, machine),),
        {**arguments, "y_ptr": y},
        {
            **shared,
            "OUT": y.shape[1],
            "OUT_UNITS": out_units,
            "OUT_BLOCK": OUT_BLOCK,
            "RANK_BLOCK": RANK_BLOCK,
            "MAX_PARTS": MAX_PARTS,
            "FIRST_PART_WORD": FIRST_PART_WORD,
            "PART_WORDS": PART_WORDS,
        },
        num_warps=4,
    )


def _reserved_column_units(num_units: int, machine: Machine) -> int:
    """How many programs each unit gets, to fill the card; units of few columns leave some idle."""
    room = PROGRAMS_PER_MULTIPROCESSOR * machine.num_multiprocessors
    return max(1, min(RESERVED_COLUMN_UNITS, room // num_units))


def _num_programs(plan: LoRAPlan, units_of_tile: int, machine: Machine) -> int:
    """One for each unit; of a reserved plan, as many as the card runs at once."""
    num_units = plan.num_tiles * units_of_tile
    if not plan.is_reserved:
        return num_units
    return min(num_units, PROGRAMS_PER_MULTIPROCESSOR * machine.num_multiprocessors)
