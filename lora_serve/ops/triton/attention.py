"""Paged attention: prefill chunks and decode by one kernel, whose bits depend on positions only.

    s[t] = q . k[t]     m = max s     z = sum of e^(scale (s[t] - m))     a = the same sum of v[t]

With soft-capping, s[t] = tanh(inner q . k[t]), and scale holds the cap. A sink is one position
more for all rows of a head: it is added to z when a is divided by it.

Each query row walks its keys in tiles of KEYS from position 0 on, with running m, z and a. After
every span of keys the three are folded into the row's totals, and begin anew (attention_spans.py).
So a span can just as well be walked by a program of its own and folded in by `fold_kernel`: few
long rows are spread over the card that way, many are not, to the same bits. Spans are longer beyond
the first NEAR_SPANS, for a row's spans are folded one after the other.

A program's rows are the GROUP heads of one KV head for some neighbouring tokens. Tiles of different
height sum a row by the same tensor core instruction and in the same order (attention_launch.py).
Keys that a row does not see but others of its program do add 0 to it: the cache holds no value that
0 could not silence. Of blocks that lie before the windows of all rows of a program nothing is
read: they may be another request's, or hold anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lora_serve.ops.triton.arithmetic import hyperbolic_tangent, multiply, rounded
from lora_serve.ops.triton.attention_spans import fold, load_4, span_of, span_start, sunk
from lora_serve.ops.triton.launch import kernel
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels


@triton.jit
def walk(
    begin,
    end,
    m,
    z,
    a,
    q,
    position,
    first_key,
    end_position,
    cache_ptr,
    table_ptr,
    scale,
    inner,
    window,
    HEAD: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tiles [begin, end) of one span. Not MASKED: every row sees all keys of every tile."""
    channel = tl.arange(0, HEAD_BLOCK)
    for tile in range(begin, end):
        key = tile * KEYS + tl.arange(0, KEYS)
        is_read = key < end_position
        if WINDOWED:
            is_read &= key >= first_key
        if MASKED:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=is_read, other=0)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        start = block.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * HEAD) + key % BLOCK_SIZE * HEAD
        k_ptrs = cache_ptr + start[None, :] + channel[:, None]
        v_ptrs = cache_ptr + KV_HEADS * BLOCK_SIZE * HEAD + start[:, None] + channel[None, :]
        if MASKED:
            k_mask = is_read[None, :] & (channel < HEAD)[:, None]
            v_mask = is_read[:, None] & (channel < HEAD)[None, :]
            k = tl.load(k_ptrs, mask=k_mask, other=0.0)
            v = tl.load(v_ptrs, mask=v_mask, other=0.0)
        elif HEAD == HEAD_BLOCK:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(channel < HEAD)[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=(channel < HEAD)[None, :], other=0.0)
        s = multiply(q, k, tl.zeros((q.shape[0], KEYS), tl.float32))
        if CAPPED:
            s = hyperbolic_tangent(s * inner)
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
    first_span,
    end_span,
    begin,
    end,
    clear_end,
    q,
    position,
    first_key,
    end_position,
    cache_ptr,
    table_ptr,
    scale,
    inner,
    window,
    HEAD: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NEAR_SPANS: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    FAR_SPAN_TILES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Walk the tiles [begin, end) of some spans.

    Where there is no window, every row sees those before clear_end whole.
    """
    total_m = tl.full((ROWS,), -float("inf"), tl.float32)
    total_z = tl.zeros((ROWS,), tl.float32)
    total_a = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    first_span = tl.maximum(first_span, span_of(begin, NEAR_SPANS, SPAN_TILES, FAR_SPAN_TILES))
    last_span = span_of(tl.maximum(end - 1, 0), NEAR_SPANS, SPAN_TILES, FAR_SPAN_TILES)
    end_span = tl.where(begin < end, tl.minimum(end_span, last_span + 1), 0)
    for span in range(first_span, end_span):
        walk_begin = tl.maximum(begin, span_start(span, NEAR_SPANS, SPAN_TILES, FAR_SPAN_TILES))
        span_end = span_start(span + 1, NEAR_SPANS, SPAN_TILES, FAR_SPAN_TILES)
        walk_end = tl.minimum(end, span_end)
        mask_begin = walk_begin
        m = tl.full((ROWS,), -float("inf"), tl.float32)
        z = tl.zeros((ROWS,), tl.float32)
        a = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
        if not WINDOWED:
            mask_begin = tl.maximum(walk_begin, tl.minimum(walk_end, clear_end))
            m, z, a = walk(
                walk_begin, mask_begin, m, z, a, q, position, first_key, end_position,
                cache_ptr, table_ptr, scale, inner, window,
                HEAD, HEAD_BLOCK, KV_HEADS, BLOCK_SIZE, KEYS, WINDOWED, CAPPED, MASKED=False,
            )  # fmt: skip
        m, z, a = walk(
            mask_begin, walk_end, m, z, a, q, position, first_key, end_position,
            cache_ptr, table_ptr, scale, inner, window,
            HEAD, HEAD_BLOCK, KV_HEADS, BLOCK_SIZE, KEYS, WINDOWED, CAPPED, MASKED=True,
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
    sinks_ptr,
    scale,
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
    SINKS: tl.constexpr,
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
        if SINKS:
            divisor += sunk(tl.load(sinks_ptr + head), m, scale)
        out = rounded(a / divisor[:, None], out_ptr.dtype.element_ty)
        to = (tile_row + token).to(tl.int64) * HEADS + head
        tl.store(out_ptr + to[:, None] * HEAD + channel[None, :], out, mask=mask)
    else:
        to = (partial_row + token).to(tl.int64) * HEADS + head
        tl.store(partial_ptr + to[:, None] * HEAD + channel[None, :], a, mask=mask)
        tl.store(partial_stats_ptr + to * 2, m, mask=in_tile)
        tl.store(partial_stats_ptr + to * 2 + 1, z, mask=in_tile)


@kernel()
def attention_kernel(
    q_ptr,
    out_ptr,
    cache_ptr,
    plan_ptr,
    partial_ptr,
    partial_stats_ptr,
    sinks_ptr,
    q_stride,
    scale,
    inner,
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
    NEAR_SPANS: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    FAR_SPAN_TILES: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # q (T, KV_HEADS GROUP, HEAD), tokens q_stride apart; out alike, contiguous
    # cache (blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD); plan: see attention_plan.py
    # partial (partial rows, KV_HEADS GROUP, HEAD), partial_stats (the same, 2): m and z
    # sinks (KV_HEADS GROUP), float32, if SINKS
    # One unit: a KV head for ROWS of a tile's (token, head of the group) pairs
    q_stride = tl.multiple_of(q_stride, 16)  # heads are multiples of it
    num_units = tl.load(plan_ptr + 2 * LIST) * (KV_HEADS * SUBTILES)
    list_start = tl.load(plan_ptr + 2 * LIST + 1)
    table_start = tl.load(plan_ptr + 6)
    table_width = tl.load(plan_ptr + 7)
    channel = tl.arange(0, HEAD_BLOCK)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        kv_head = unit // SUBTILES % KV_HEADS
        tile_ptr = plan_ptr + list_start + unit // (SUBTILES * KV_HEADS) * TILE_WORDS
        request, tile_row, num_tokens, tile_position = load_4(tile_ptr)
        first_span = tl.load(tile_ptr + 4)
        end_span = tl.load(tile_ptr + 5)
        partial_row = tl.load(tile_ptr + 6)
        wait_for_earlier_kernels(OVERLAPS)

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
        first_key = 0
        end = tl.where(first_position < end_position, tl.cdiv(end_position, KEYS), 0)
        clear_end = (first_position + 1) // KEYS
        if WINDOWED:
            first_key = tl.maximum(first_position - window + 1, 0)
        begin = first_key // KEYS
        head_ptr = cache_ptr + kv_head * (BLOCK_SIZE * HEAD)
        table_ptr = plan_ptr + table_start + request * table_width
        m, z, a = walk_spans(
            first_span, end_span, begin, end, clear_end,
            q, position, first_key, end_position, head_ptr, table_ptr, scale, inner, window,
            HEAD, HEAD_BLOCK, KV_HEADS, BLOCK_SIZE, ROWS, KEYS,
            NEAR_SPANS, SPAN_TILES, FAR_SPAN_TILES, WINDOWED, CAPPED,
        )  # fmt: skip
        # 0, but loaded: else the rows' addresses would be kept in registers since q was read.
        first_pair += tl.load(tile_ptr + 7)
        first_head = kv_head * GROUP
        store(
            m, z, a, out_ptr, partial_ptr, partial_stats_ptr, sinks_ptr, scale,
            tile_row, partial_row, num_tokens, first_pair, first_head,
            HEAD, HEAD_BLOCK, KV_HEADS * GROUP, GROUP, ROWS, SINKS,
        )  # fmt: skip
    wait_for_earlier_kernels(OVERLAPS)  # without a unit, too
