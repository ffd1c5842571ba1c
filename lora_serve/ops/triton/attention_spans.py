"""Spans of a row's keys: where each begins, and how their sums are folded into the row's.

    m = max s     z = sum of e^(scale (s[t] - m))     a = the same sum of v[t]

A row's spans are folded in ascending order, in the program that walked them (attention.py) or, if
they were walked apart, in one of `fold_kernel`: to the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lora_serve.ops.triton.arithmetic import rounded
from lora_serve.ops.triton.launch import kernel
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels


@triton.jit
def fold(total_m, total_z, total_a, m, z, a, scale):
    """Totals and the sums after them. fma leaves the compiler no choice of what to fuse."""
    new_m = tl.maximum(total_m, m)
    base = tl.where(new_m == -float("inf"), 0.0, new_m)
    old_weight = tl.exp2((total_m - base) * scale)
    weight = tl.exp2((m - base) * scale)
    new_z = tl.fma(total_z, old_weight, z * weight)
    new_a = tl.fma(total_a, old_weight[:, None], a * weight[:, None])
    return new_m, new_z, new_a


@triton.jit
def sunk(sink, m, scale):
    """What a sink, a score in natural units, adds to z."""
    return tl.exp2(sink * 1.4426950408889634 - m * scale)


@triton.jit
def span_start(
    span, NEAR_SPANS: tl.constexpr, SPAN_TILES: tl.constexpr, FAR_SPAN_TILES: tl.constexpr
):
    """The first tile of a span."""
    far = tl.maximum(span - NEAR_SPANS, 0)
    return tl.minimum(span, NEAR_SPANS) * SPAN_TILES + far * FAR_SPAN_TILES


@triton.jit
def span_of(tile, NEAR_SPANS: tl.constexpr, SPAN_TILES: tl.constexpr, FAR_SPAN_TILES: tl.constexpr):
    """The span that a tile lies in."""
    far = tl.maximum(tile - NEAR_SPANS * SPAN_TILES, 0)
    return tl.minimum(tile // SPAN_TILES, NEAR_SPANS) + far // FAR_SPAN_TILES


@triton.jit
def load_4(words_ptr):
    return (
        tl.load(words_ptr),
        tl.load(words_ptr + 1),
        tl.load(words_ptr + 2),
        tl.load(words_ptr + 3),
    )


@kernel()
def fold_kernel(
    out_ptr,
    plan_ptr,
    partial_ptr,
    partial_stats_ptr,
    sinks_ptr,
    scale,
    HEAD: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_BLOCKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    FOLD_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # The spans of one token that were walked apart, in ascending order
    # One unit: some channels of a KV head's group
    num_units = tl.load(plan_ptr + 4) * (KV_HEADS * CHANNEL_BLOCKS)
    fold_start = tl.load(plan_ptr + 5)
    row = tl.arange(0, GROUP_BLOCK)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        channel = unit % CHANNEL_BLOCKS * CHANNELS + tl.arange(0, CHANNELS)
        mask = (row < GROUP)[:, None] & (channel < HEAD)[None, :]
        kv_head = unit // CHANNEL_BLOCKS % KV_HEADS
        fold_ptr = plan_ptr + fold_start + unit // (CHANNEL_BLOCKS * KV_HEADS) * FOLD_WORDS
        token_row, partial_row, span_rows, num_spans = load_4(fold_ptr)
        wait_for_earlier_kernels(OVERLAPS)
        total_m = tl.full((GROUP_BLOCK,), -float("inf"), tl.float32)
        total_z = tl.zeros((GROUP_BLOCK,), tl.float32)
        total_a = tl.zeros((GROUP_BLOCK, CHANNELS), tl.float32)
        # Each fold waits for the one before it; what it folds is fetched ahead.
        for span in tl.range(num_spans, num_stages=STAGES):
            source = (partial_row + span * span_rows).to(tl.int64) * (KV_HEADS * GROUP)
            source += kv_head * GROUP + row
            m = tl.load(partial_stats_ptr + source * 2, mask=row < GROUP, other=0.0)
            z = tl.load(partial_stats_ptr + source * 2 + 1, mask=row < GROUP, other=1.0)
            a_ptrs = partial_ptr + source[:, None] * HEAD + channel[None, :]
            a = tl.load(a_ptrs, mask=mask, other=0.0)
            total_m, total_z, total_a = fold(total_m, total_z, total_a, m, z, a, scale)
        if SINKS:
            sink = tl.load(sinks_ptr + kv_head * GROUP + row, mask=row < GROUP, other=0.0)
            total_z += sunk(sink, total_m, scale)
        out = rounded(total_a / total_z[:, None], out_ptr.dtype.element_ty)
        head = token_row.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row
        tl.store(out_ptr + head[:, None] * HEAD + channel[None, :], out, mask=mask)
    wait_for_earlier_kernels(OVERLAPS)  # without a unit, too
