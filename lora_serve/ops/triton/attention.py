"""Paged attention: prefill chunks and decode by one kernel, whose bits depend on positions only.

    s[t] = q . k[t]     m = max s     z = sum of e^(scale (s[t] - m))     a = the same sum of v[t]

Each query row walks its keys in tiles of KEYS from position 0 on, with running m, z and a. After
every span of keys the three are folded into the row's totals, and begin anew. So a span can just as
well be walked by a program of its own and folded in by `fold_kernel`: few long rows are spread over
the card that way, many are not, and no bit tells.

A program's rows are the GROUP heads of one KV head for some neighbouring tokens. Tiles of different
height sum a row by the same tensor core instruction and in the same order (see `_tile`). Keys that
a row does not see but others of its program do add 0 to it: the cache holds no value that 0 could
not silence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_serve.ops.triton.arithmetic import multiply, rounded
from lora_serve.ops.triton.attention_plan import (
    FOLD_WORDS,
    SPAN,
    TILE_TOKENS,
    TILE_WORDS,
    AttentionPlan,
)
from lora_serve.ops.triton.kv_cache import token_stride
from lora_serve.ops.triton.launch import Launch, Machine

LOG2_E = 1.4426950408889634


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
def walk(
    begin,
    end,
    m,
    z,
    a,
    q,
    position,
    end_position,
    cache_ptr,
    table_ptr,
    scale,
    window,
    HEAD: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tiles [begin, end) of one span. Not MASKED: every row sees all keys of every tile."""
    channel = tl.arange(0, HEAD_BLOCK)
    for tile in range(begin, end):
        key = tile * KEYS + tl.arange(0, KEYS)
        if MASKED:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end_position, other=0)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        start = block.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * HEAD) + key % BLOCK_SIZE * HEAD
        k_ptrs = cache_ptr + start[None, :] + channel[:, None]
        v_ptrs = cache_ptr + KV_HEADS * BLOCK_SIZE * HEAD + start[:, None] + channel[None, :]
        if MASKED:
            k_mask = (key < end_position)[None, :] & (channel < HEAD)[:, None]
            v_mask = (key < end_position)[:, None] & (channel < HEAD)[None, :]
            k = tl.load(k_ptrs, mask=k_mask, other=0.0)
            v = tl.load(v_ptrs, mask=v_mask, other=0.0)
        elif HEAD == HEAD_BLOCK:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(channel < HEAD)[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=(channel < HEAD)[None, :], other=0.0)
        s = multiply(q, k, tl.zeros((q.shape[0], KEYS), tl.float32))
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOWED:
                visible &= key[None, :] > position[:, None] - window
            s = tl.where(visible, s, -float("inf"))
        new_m = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(new_m == -float("inf"), 0.0, new_m) if MASKED else new_m
        old_weight = tl.exp2((m - base) * scale)
        weight = tl.exp2(tl.fma(s, scale, -(base * scale)[:, None]))
        z = tl.fma(z, old_weight, tl.sum(weight, axis=1))
        a = multiply(rounded(weight, v.dtype), v, a * old_weight[:, None])
        m = new_m
    return m, z, a


@triton.jit
def walk_spans(
    begin,
    end,
    clear_end,
    q,
    position,
    end_position,
    cache_ptr,
    table_ptr,
    scale,
    window,
    HEAD: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Tiles [begin, end), of which those before clear_end are seen whole by every row."""
    total_m = tl.full((ROWS,), -float("inf"), tl.float32)
    total_z = tl.zeros((ROWS,), tl.float32)
    total_a = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    for span_begin in range(begin // SPAN_TILES * SPAN_TILES, end, SPAN_TILES):
        walk_begin = tl.maximum(begin, span_begin)
        walk_end = tl.minimum(end, span_begin + SPAN_TILES)
        mask_begin = tl.maximum(walk_begin, tl.minimum(walk_end, clear_end))
        m = tl.full((ROWS,), -float("inf"), tl.float32)
        z = tl.zeros((ROWS,), tl.float32)
        a = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
        if not WINDOWED:
            m, z, a = walk(
                walk_begin, mask_begin, m, z, a, q, position, end_position,
                cache_ptr, table_ptr, scale, window,
                HEAD, HEAD_BLOCK, KV_HEADS, BLOCK_SIZE, KEYS, WINDOWED, MASKED=False,
            )  # fmt: skip
        m, z, a = walk(
            mask_begin, walk_end, m, z, a, q, position, end_position,
            cache_ptr, table_ptr, scale, window,
            HEAD, HEAD_BLOCK, KV_HEADS, BLOCK_SIZE, KEYS, WINDOWED, MASKED=True,
        )  # fmt: skip
        total_m, total_z, total_a = fold(total_m, total_z, total_a, m, z, a, scale)
    return total_m, total_z, total_a


@triton.jit
def store(
    m,
    z,
    a,
    out_ptr,
    partial_ptr,
    partial_stats_ptr,
    tile_row,
    partial_row,
    num_tokens,
    first_pair,
    first_head,
    HEAD: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows as the answer; or, where there is a partial row for them, as sums to be folded."""
    pair = first_pair + tl.arange(0, ROWS)
    token = pair // GROUP
    head = first_head + pair % GROUP
    in_tile = token < num_tokens
    channel = tl.arange(0, HEAD_BLOCK)
    mask = in_tile[:, None] & (channel < HEAD)[None, :]
    if partial_row < 0:
        # A padding row sees no key: its attention is 0.
        divisor = tl.where(z == 0.0, 1.0, z)
        out = rounded(a / divisor[:, None], out_ptr.dtype.element_ty)
        to = (tile_row + token).to(tl.int64) * HEADS + head
        tl.store(out_ptr + to[:, None] * HEAD + channel[None, :], out, mask=mask)
    else:
        to = (partial_row + token).to(tl.int64) * HEADS + head
        tl.store(partial_ptr + to[:, None] * HEAD + channel[None, :], a, mask=mask)
        tl.store(partial_stats_ptr + to * 2, m, mask=in_tile)
        tl.store(partial_stats_ptr + to * 2 + 1, z, mask=in_tile)


@triton.jit
def attention_kernel(
    q_ptr,
    out_ptr,
    cache_ptr,
    plan_ptr,
    partial_ptr,
    partial_stats_ptr,
    q_stride,
    scale,
    window,
    HEAD: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LIST: tl.constexpr,
    SUBTILES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    # q (T, KV_HEADS GROUP, HEAD), tokens q_stride apart; out alike, contiguous
    # cache (blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD); plan: see attention_plan.py
    # partial (partial rows, KV_HEADS GROUP, HEAD), partial_stats (the same, 2): m and z
    # One unit: a KV head for ROWS of a tile's (token, head of the group) pairs
    num_units = tl.load(plan_ptr + 2 * LIST) * (KV_HEADS * SUBTILES)
    list_start = tl.load(plan_ptr + 2 * LIST + 1)
    table_start = tl.load(plan_ptr + 6)
    table_width = tl.load(plan_ptr + 7)
    channel = tl.arange(0, HEAD_BLOCK)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        kv_head = unit // SUBTILES % KV_HEADS
        tile_ptr = plan_ptr + list_start + unit // (SUBTILES * KV_HEADS) * TILE_WORDS
        request = tl.load(tile_ptr)
        tile_row = tl.load(tile_ptr + 1)
        num_tokens = tl.load(tile_ptr + 2)
        tile_position = tl.load(tile_ptr + 3)
        first_span = tl.load(tile_ptr + 4)
        end_span = tl.load(tile_ptr + 5)
        partial_row = tl.load(tile_ptr + 6)

        first_pair = unit % SUBTILES * ROWS
        pair = first_pair + tl.arange(0, ROWS)
        token = pair // GROUP
        head = kv_head * GROUP + pair % GROUP
        in_tile = token < num_tokens
        mask = in_tile[:, None] & (channel < HEAD)[None, :]
        row = (tile_row + token).to(tl.int64)
        q_ptrs = q_ptr + (row * q_stride + head * HEAD)[:, None] + channel[None, :]
        q = tl.load(q_ptrs, mask=mask, other=0.0)

        position = tile_position + token
        first_position = tile_position + first_pair // GROUP
        end_position = tile_position + tl.minimum(num_tokens, (first_pair + ROWS - 1) // GROUP + 1)
        begin = first_span * SPAN_TILES
        end = tl.minimum(end_span * SPAN_TILES, tl.cdiv(end_position, KEYS))
        end = tl.where(first_position < end_position, end, begin)
        if WINDOWED:
            begin = tl.maximum(begin, tl.maximum(first_position - window + 1, 0) // KEYS)
            clear_end = begin
        else:
            clear_end = (first_position + 1) // KEYS
        head_ptr = cache_ptr + kv_head * (BLOCK_SIZE * HEAD)
        table_ptr = plan_ptr + table_start + request * table_width
        m, z, a = walk_spans(
            begin, end, clear_end, q, position, end_position, head_ptr, table_ptr, scale, window,
            HEAD, HEAD_BLOCK, KV_HEADS, BLOCK_SIZE, ROWS, KEYS, SPAN_TILES, WINDOWED,
        )  # fmt: skip
        # 0, but loaded: else the rows' addresses would be kept in registers since q was read.
        first_pair += tl.load(tile_ptr + 7)
        first_head = kv_head * GROUP
        store(
            m, z, a, out_ptr, partial_ptr, partial_stats_ptr,
            tile_row, partial_row, num_tokens, first_pair, first_head,
            HEAD, HEAD_BLOCK, KV_HEADS * GROUP, GROUP, ROWS,
        )  # fmt: skip


@triton.jit
def fold_kernel(
    out_ptr,
    plan_ptr,
    partial_ptr,
    partial_stats_ptr,
    scale,
    HEAD: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    FOLD_WORDS: tl.constexpr,
):
    # The spans of one token that were walked apart, in ascending order, for a KV head's group
    num_units = tl.load(plan_ptr + 4) * KV_HEADS
    fold_start = tl.load(plan_ptr + 5)
    row = tl.arange(0, GROUP_BLOCK)
    channel = tl.arange(0, HEAD_BLOCK)
    mask = (row < GROUP)[:, None] & (channel < HEAD)[None, :]
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        kv_head = unit % KV_HEADS
        fold_ptr = plan_ptr + fold_start + unit // KV_HEADS * FOLD_WORDS
        token_row = tl.load(fold_ptr).to(tl.int64)
        partial_row = tl.load(fold_ptr + 1)
        span_rows = tl.load(fold_ptr + 2)
        num_spans = tl.load(fold_ptr + 3)
        total_m = tl.full((GROUP_BLOCK,), -float("inf"), tl.float32)
        total_z = tl.zeros((GROUP_BLOCK,), tl.float32)
        total_a = tl.zeros((GROUP_BLOCK, HEAD_BLOCK), tl.float32)
        for span in range(num_spans):
            source = (partial_row + span * span_rows).to(tl.int64) * (KV_HEADS * GROUP)
            source += kv_head * GROUP + row
            m = tl.load(partial_stats_ptr + source * 2, mask=row < GROUP, other=0.0)
            z = tl.load(partial_stats_ptr + source * 2 + 1, mask=row < GROUP, other=1.0)
            a_ptrs = partial_ptr + source[:, None] * HEAD + channel[None, :]
            a = tl.load(a_ptrs, mask=mask, other=0.0)
            total_m, total_z, total_a = fold(total_m, total_z, total_a, m, z, a, scale)
        out = rounded(total_a / total_z[:, None], out_ptr.dtype.element_ty)
        head = token_row * (KV_HEADS * GROUP) + kv_head * GROUP + row
        tl.store(out_ptr + head[:, None] * HEAD + channel[None, :], out, mask=mask)


def attention_launches(
    q: Tensor,
    out: Tensor,
    kv_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    machine: Machine,
) -> list[Launch]:
    """All of one call: single tiles, wide tiles, then the fold of what was walked apart."""
    num_heads = q.shape[1]
    _, _, num_kv_heads, block_size, head_size = kv_cache.shape
    partial = out.new_empty((plan.num_partial_rows, num_heads, head_size), dtype=torch.float32)
    stats = out.new_empty((plan.num_partial_rows, num_heads, 2), dtype=torch.float32)
    shared: dict[str, Tensor | int | float] = {
        "out_ptr": out,
        "plan_ptr": plan.words,
        "partial_ptr": partial,
        "partial_stats_ptr": stats,
        "scale": scale * LOG2_E,
    }
    group = num_heads // num_kv_heads
    shape: dict[str, int | bool] = {
        "HEAD": head_size,
        "HEAD_BLOCK": triton.next_power_of_2(head_size),
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
    }
    launches = []
    for index, (num_tiles, tokens) in enumerate(
        ((plan.num_single, 1), (plan.num_wide, TILE_TOKENS))
    ):
        tile = _tile(q.dtype, head_size, tokens * group, machine)
        subtiles = triton.cdiv(tokens * group, tile.rows)
        launches.append(
            Launch(
                attention_kernel,
                (plan.num_programs(num_tiles * num_kv_heads * subtiles, machine),),
                {
                    **shared,
                    "q_ptr": q,
                    "cache_ptr": kv_cache,
                    "q_stride": token_stride(q),
                    "window": sliding_window or 0,
                },
                {
                    **shape,
                    "BLOCK_SIZE": block_size,
                    "LIST": index,
                    "SUBTILES": subtiles,
                    "ROWS": tile.rows,
                    "KEYS": tile.keys,
                    "SPAN_TILES": SPAN // tile.keys,
                    "TILE_WORDS": TILE_WORDS,
                    "WINDOWED": sliding_window is not None,
                },
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        )
    folds = Launch(
        fold_kernel,
        (plan.num_programs(plan.num_folds * num_kv_heads, machine),),
        shared,
        {**shape, "GROUP_BLOCK": triton.next_power_of_2(group), "FOLD_WORDS": FOLD_WORDS},
        num_warps=2,
    )
    return [*launches, folds]


@dataclass(frozen=True, slots=True)
class _Tile:
    """keys follows from dtype and head size alone: sums are cut there."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _tile(dtype: torch.dtype, head_size: int, num_rows: int, machine: Machine) -> _Tile:
    """The largest that registers hold.

    Where a card has two for a head size, they agree in bits: 64 rows by 4 warps and 128 by 8 take
    one instruction, and each row lies within one warp.
    """
    if dtype == torch.float32:
        return _Tile(rows=64, keys=32, num_warps=8, num_stages=1)
    if head_size > 128:
        return _Tile(rows=32, keys=64, num_warps=8, num_stages=2)
    if machine.capability < 90:
        return _Tile(rows=64, keys=64, num_warps=8, num_stages=3)
    keys = 64 if head_size <= 64 else 32
    if num_rows <= 64:
        return _Tile(rows=64, keys=keys, num_warps=4, num_stages=3)
    return _Tile(rows=128, keys=keys, num_warps=8, num_stages=3)
