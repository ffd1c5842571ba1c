"""How attention's kernels are launched: grids and tiles, by the shapes of q and the cache.

The one rule: what cuts a row's sum, the number of keys in a tile, follows from dtype and head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lora_serve.ops.triton.attention import attention_kernel, fold_kernel
from lora_serve.ops.triton.attention_plan import (
    FAR_SPAN,
    FOLD_WORDS,
    NEAR_SPANS,
    SPAN,
    TILE_TOKENS,
    TILE_WORDS,
    AttentionPlan,
)
from lora_serve.ops.triton.kv_cache import token_stride
from lora_serve.ops.triton.launch import Launch, Machine

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
        "scale": (scale if softcap is None else softcap) * LOG2_E,
    }
    group = num_heads // num_kv_heads
    shape: dict[str, int | bool] = {
        "HEAD": head_size,
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "OVERLAPS": machine.overlaps_launches,
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
                    "inner": 0.0 if softcap is None else scale / softcap,
                    "window": sliding_window or 0,
                },
                {
                    **shape,
                    "HEAD_BLOCK": triton.next_power_of_2(head_size),
                    "BLOCK_SIZE": block_size,
                    "LIST": index,
                    "SUBTILES": subtiles,
                    "ROWS": tile.rows,
                    "KEYS": tile.keys,
                    "NEAR_SPANS": NEAR_SPANS,
                    "SPAN_TILES": SPAN // tile.keys,
                    "FAR_SPAN_TILES": FAR_SPAN // tile.keys,
                    "TILE_WORDS": TILE_WORDS,
                    "WINDOWED": sliding_window is not None,
                    "CAPPED": softcap is not None,
                },
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        )
    channel_blocks = triton.cdiv(head_size, FOLD_CHANNELS)
    folds = Launch(
        fold_kernel,
        (plan.num_programs(plan.num_folds * num_kv_heads * channel_blocks, machine),),
        shared,
        {
            **shape,
            "CHANNELS": FOLD_CHANNELS,
            "CHANNEL_BLOCKS": channel_blocks,
            "GROUP_BLOCK": triton.next_power_of_2(group),
            "FOLD_WORDS": FOLD_WORDS,
            "STAGES": FOLD_STAGES,
        },
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
