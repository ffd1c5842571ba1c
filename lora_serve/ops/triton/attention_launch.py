"""How attention's kernels are launched: grids and tiles, by the shapes of q and the cache.

The one rule: what cuts a row's sum, the number of keys in a tile, follows from dtype and head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lora_serve.ops.triton.attention import attention_kernel
from lora_serve.ops.triton.attention_plan import (
    FAR_SPAN,
    FOLD_WORDS,
    NEAR_SPANS,
    SPAN,
    TILE_TOKENS,
    TILE_WORDS,
    AttentionPlan,
)
from lora_serve.ops.triton.attention_spans import fold_kernel
from lora_serve.ops.triton.kv_cache import token_stride
from lora_serve.ops.triton.launch import Arguments, Constants, Launch, Machine

LOG2_E = 1.4426950408889634
FOLD_CHANNELS = 32  # of one program: few rows of many spans keep more than a few busy
FOLD_STAGES = 8  # spans on their way while one is folded


def attention_launches(
    q: Tensor,
    out: Tensor,
    kv_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    machine: Machine,
) -> list[Launch]:
    """All of one call: single tiles, wide tiles, then the fold of what was walked apart."""
    num_heads = q.shape[1]
    _, _, num_kv_heads, block_size, head_size = kv_cache.shape
    partial = out.new_empty((plan.num_partial_rows, num_heads, head_size), dtype=torch.float32)
    stats = out.new_empty((plan.num_partial_rows, num_heads, 2), dtype=torch.float32)
    shared: Arguments = {
        "out_ptr": out,
        "plan_ptr": plan.words,
        "partial_ptr": partial,
        "partial_stats_ptr": stats,
        "sinks_ptr": stats if sinks is None else sinks,
        "scale": (scale if softcap is None else softcap) * LOG2_E,
    }
    shape: Constants = {
        "HEAD": head_size,
        "KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "SINKS": sinks is not None,
        "OVERLAPS": machine.overlaps_launches,
    }
    arguments: Arguments = {
        **shared,
        "q_ptr": q,
        "cache_ptr": kv_cache,
        "q_stride": token_stride(q),
        "inner": 0.0 if softcap is None else scale / softcap,
        "window": sliding_window or 0,
    }
    walked: Constants = {
        **shape,
        "BLOCK_SIZE": block_size,
        "WINDOWED": sliding_window is not None,
        "CAPPED": softcap is not None,
    }
    return [
        _walk_launch(arguments, walked, 0, 1, q.dtype, plan, machine),
        _walk_launch(arguments, walked, 1, TILE_TOKENS, q.dtype, plan, machine),
        _fold_launch(shared, shape, plan, machine),
    ]


def _walk_launch(
    arguments: Arguments,
    shape: Constants,
    index: int,
    num_tokens: int,
    dtype: torch.dtype,
    plan: AttentionPlan,
    machine: Machine,
) -> Launch:
    """Walk the tiles of the plan's list `index`, which have num_tokens tokens each."""
    head_size, num_rows = shape["HEAD"], num_tokens * shape["GROUP"]
    tile = _tile(dtype, head_size, num_rows, machine)
    subtiles = triton.cdiv(num_rows, tile.rows)
    num_tiles = (plan.num_single, plan.num_wide)[index]
    return Launch(
        attention_kernel,
        (plan.num_programs(num_tiles * shape["KV_HEADS"] * subtiles, machine),),
        arguments,
        {
            **shape,
            "HEAD_BLOCK": triton.next_power_of_2(head_size),
            "LIST": index,
            "SUBTILES": subtiles,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "NEAR_SPANS": NEAR_SPANS,
            "SPAN_TILES": SPAN // tile.keys,
            "FAR_SPAN_TILES": FAR_SPAN // tile.keys,
            "TILE_WORDS": TILE_WORDS,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _fold_launch(
    arguments: Arguments, shape: Constants, plan: AttentionPlan, machine: Machine
) -> Launch:
    """Fold the spans that were walked apart."""
    channel_blocks = triton.cdiv(shape["HEAD"], FOLD_CHANNELS)
    return Launch(
        fold_kernel,
        (plan.num_programs(plan.num_folds * shape["KV_HEADS"] * channel_blocks, machine),),
        arguments,
        {
            **shape,
            "CHANNELS": FOLD_CHANNELS,
            "CHANNEL_BLOCKS": channel_blocks,
            "GROUP_BLOCK": triton.next_power_of_2(shape["GROUP"]),
            "FOLD_WORDS": FOLD_WORDS,
            "STAGES": FOLD_STAGES,
        },
        num_warps=2,
    )


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
