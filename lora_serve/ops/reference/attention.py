"""Paged attention with rotary positions. Hq query heads share Hkv key heads, G = Hq / Hkv each.

    s[t] = scale * q . k[t]        w[t] = e^(s[t] - max s), 0 where t is hidden
    or, with soft-capping, s[t] = softcap * tanh(scale * q . k[t] / softcap)
    out  = sum over tiles of (sum of w v in the tile)  /  sum over tiles of (sum of w in the tile)

With sinks, e^(sink - max s) of the head is added to the divisor.

A tile is KV_TILE keys from a multiple of KV_TILE on, whichever of them the query may see, and
tiles are added in ascending order, starting from 0. A tile that is wholly hidden adds 0, so it does
not matter which tiles a chunk walks as long as they cover what each of its queries sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, dtype

from lora_serve.ops.reference.arithmetic import (
    exponential,
    hyperbolic_tangent,
    multiply_tiles,
    pad_rows,
    row_sum,
)

KV_TILE = 256
SCORES_AT_ONCE = 1 << 19  # bounds temporaries; 16 queries of 8 heads over 4096 keys


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Rows [start, end) are the last of seq_len positions; blocks hold them all, in order."""

    start: int
    end: int
    seq_len: int
    blocks: Tensor

    @property
    def first_position(self) -> int:
        return self.seq_len - (self.end - self.start)

    def first_visible(self, sliding_window: int | None) -> int:
        return 0 if sliding_window is None else max(0, self.first_position - sliding_window + 1)


def new_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: dtype
) -> Tensor:
    """(num_blocks, 2 for K and V, num_kv_heads, block_size, head_size), uninitialised."""
    return torch.empty(num_blocks, 2, num_kv_heads, block_size, head_size, dtype=dtype)


def rotary_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    q.copy_(_rotate(q, cos, sin))
    block_size = kv_cache.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[blocks, 0, :, offsets] = _rotate(k, cos, sin).to(kv_cache.dtype)
    kv_cache[blocks, 1, :, offsets] = v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def plan_attention(
    query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int
) -> tuple[RequestPlan, ...]:
    starts = query_start_loc.tolist()
    return tuple(
        RequestPlan(start, end, seq_len, table[: -(-seq_len // block_size)].long())
        for start, end, seq_len, table in zip(
            starts[:-1], starts[1:], seq_lens.tolist(), block_tables, strict=True
        )
    )


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    plan: tuple[RequestPlan, ...],
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    for request in plan:
        keys, values = _read_tiles(kv_cache, request, request.first_visible(sliding_window))
        for start, end in _query_chunks(request, q.shape[1]):
            positions = torch.arange(start, end) + (request.seq_len - request.end)
            out[start:end] = _attend(
                q[start:end], positions, keys, values, scale, sliding_window, softcap, sinks
            ).to(q.dtype)
    return out


def _query_chunks(request: RequestPlan, num_heads: int) -> Iterator[tuple[int, int]]:
    size = max(16, SCORES_AT_ONCE // (num_heads * max(request.seq_len, KV_TILE)))
    for start in range(request.start, request.end, size):
        yield start, min(start + size, request.end)


def _read_tiles(
    kv_cache: Tensor, request: RequestPlan, first_visible: int
) -> tuple[Tensor, Tensor]:
    """The request's keys (tiles, Hkv, KV_TILE, D) and values (tiles, Hkv, D, KV_TILE), float32.

    Zero beyond seq_len and before the block of first_visible, whatever the blocks hold there.
    """
    _, _, num_kv_heads, block_size, head_size = kv_cache.shape
    num_tiles = -(-request.seq_len // KV_TILE)
    tiles = torch.zeros(2, num_kv_heads, num_tiles * KV_TILE, head_size, dtype=torch.float32)
    first_block = first_visible // block_size
    blocks = kv_cache[request.blocks[first_block:]].permute(1, 2, 0, 3, 4)
    read = slice(first_block * block_size, request.seq_len)
    tiles[:, :, read] = blocks.reshape(2, num_kv_heads, -1, head_size)[
        :, :, : read.stop - read.start
    ]
    keys, values = tiles.view(2, num_kv_heads, num_tiles, KV_TILE, head_size).transpose(1, 2)
    return keys.contiguous(), values.transpose(2, 3).contiguous()


def _attend(
    q: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The formula for q (n, Hq, D) at ascending `positions` (n) -> (n, Hq, D), float32."""
    num_queries, num_heads, head_size = q.shape
    num_kv_heads = keys.shape[1]
    first = 0 if sliding_window is None else max(0, int(positions[0]) - sliding_window + 1)
    span = slice(first // KV_TILE, int(positions[-1]) // KV_TILE + 1)
    # Tiles that every query sees whole need no masking; under a window, all are masked.
    num_clear = 0 if sliding_window is not None else (int(positions[0]) + 1) // KV_TILE
    rows = [
        pad_rows(group.transpose(0, 1).reshape(-1, head_size))
        for group in q.chunk(num_kv_heads, dim=1)
    ]
    row_positions = positions.repeat(num_heads // num_kv_heads)
    scores = _scores(rows, keys[span], scale)
    if softcap is not None:
        scores = hyperbolic_tangent(scores.div_(softcap)).mul_(softcap)
    masked = slice(span.start + num_clear, span.stop)
    hidden = _hidden(row_positions, rows[0].shape[0], masked, sliding_window)
    scores[num_clear:].masked_fill_(hidden, -torch.inf)
    highest = scores.amax(dim=(0, 3), keepdim=True)
    weights = exponential(scores.sub_(highest))
    weights[num_clear:].masked_fill_(hidden, 0.0)
    finite, broken = _split_finite(values[span])
    sunk = None if sinks is None else _sunk(sinks, highest[0, :, :, 0], num_queries)
    out = _weighted_values(weights, finite, sunk)
    if broken is not None:
        out.masked_fill_(_see_any(broken, num_clear, hidden), torch.nan)
    out = out[:, : row_positions.shape[0]]
    return out.reshape(num_heads, num_queries, head_size).transpose(0, 1)


def _scores(rows: list[Tensor], keys: Tensor, scale: float) -> Tensor:
    """(tiles, Hkv, rows, KV_TILE)."""
    num_tiles, num_kv_heads = keys.shape[:2]
    scores = keys.new_empty(num_tiles, num_kv_heads, rows[0].shape[0], KV_TILE)
    for tile in range(num_tiles):
        for head in range(num_kv_heads):
            multiply_tiles(rows[head], keys[tile, head], scores[tile, head])
    return scores.mul_(scale)


def _hidden(
    row_positions: Tensor, num_rows: int, span: slice, sliding_window: int | None
) -> Tensor:
    """(tiles, 1, rows, KV_TILE), bool: keys that a row does not see. Padding sees key 0 on."""
    position = row_positions.new_full((num_rows,), int(row_positions[-1]))
    position[: row_positions.shape[0]] = row_positions
    key = torch.arange(span.start * KV_TILE, span.stop * KV_TILE).view(-1, 1, 1, KV_TILE)
    hidden = key > position[:, None]
    if sliding_window is not None:
        hidden |= key <= position[:, None] - sliding_window
    return hidden


def _sunk(sinks: Tensor, highest: Tensor, num_queries: int) -> Tensor:
    """e^(sink - max s) of each row: (Hkv, rows), as `highest`. Padding has a sink of 0."""
    of_rows = torch.zeros_like(highest)
    of_heads = sinks.view(len(highest), -1).repeat_interleave(num_queries, dim=1)
    of_rows[:, : of_heads.shape[1]] = of_heads
    return exponential(of_rows - highest)


def _weighted_values(weights: Tensor, values: Tensor, sunk: Tensor | None) -> Tensor:
    """(Hkv, rows, D): the quotient of sums in the formula above. sunk: what the divisor gets."""
    num_tiles, num_kv_heads, num_rows, _ = weights.shape
    partial = values.new_empty(num_tiles, num_kv_heads, num_rows, values.shape[2])
    for tile in range(num_tiles):
        for head in range(num_kv_heads):
            multiply_tiles(weights[tile, head], values[tile, head], partial[tile, head])
    divisor = _sum_in_order(row_sum(weights))
    if sunk is not None:
        divisor += sunk
    return _sum_in_order(partial) / divisor[..., None]


def _split_finite(values: Tensor) -> tuple[Tensor, Tensor | None]:
    """Values with 0 for what is not finite, and where that is; None if nowhere.

    A weight of 0 would not keep an infinite value of a later token from this token's sum.
    """
    is_finite = values.isfinite()
    if is_finite.all():
        return values, None
    return torch.where(is_finite, values, 0.0), ~is_finite


def _see_any(broken: Tensor, num_clear: int, hidden: Tensor) -> Tensor:
    """Which of a row's outputs (Hkv, rows, D) see a value marked in `broken`."""
    visible = torch.ones(broken.shape[0], 1, *hidden.shape[2:])
    visible[num_clear:] = (~hidden).to(torch.float32)
    return (visible @ broken.to(torch.float32).transpose(2, 3)).sum(0) > 0


def _sum_in_order(parts: Tensor) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total
