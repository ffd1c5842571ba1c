"""The paged cache, and rotary positions fused with writing it. A row without a slot writes nothing.

    cache (num_blocks, 2 for K and V, KV heads, block_size, head_size)

Every value in it is finite. Where a head of v overflowed, v becomes 0 and its k NaN: rows that see
the token still come out NaN, and rows before it are spared (0 times infinity would be NaN).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.ops.triton.arithmetic import rounded
from lora_serve.ops.triton.launch import Launch, Machine, kernel
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels

MIN_HEAD_SIZE, MAX_HEAD_SIZE, HEAD_STEP = 16, 256, 16


def new_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Uninitialised.

    Raises:
        ConfigError: for a head size that the attention kernel has no tiles for.
    """
    if head_size % HEAD_STEP or not MIN_HEAD_SIZE <= head_size <= MAX_HEAD_SIZE:
        raise ConfigError(
            f"head size {head_size}: the Triton kernels need a multiple of {HEAD_STEP} from "
            f"{MIN_HEAD_SIZE} to {MAX_HEAD_SIZE}; serve this model on the CPU (--device cpu)"
        )
    shape = (num_blocks, 2, num_kv_heads, block_size, head_size)
    return torch.empty(shape, dtype=dtype, device=device)


@kernel("positions_ptr", "slot_mapping_ptr")
def rotary_and_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    cache_ptr,
    slot_mapping_ptr,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    HEAD: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin: x1 and x2 are the halves of a head
    # q (T, HEADS, HEAD), k and v (T, KV_HEADS, HEAD): tokens *_stride apart; cos_sin (P, HEAD)
    # One row: a token's head of q; or of k, together with that of v
    HALF: tl.constexpr = HEAD // 2
    # Heads are multiples of 16.
    q_stride = tl.multiple_of(q_stride, 16)
    k_stride = tl.multiple_of(k_stride, 16)
    v_stride = tl.multiple_of(v_stride, 16)
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (index // (HEADS + KV_HEADS)).to(tl.int64)
    head = index % (HEADS + KV_HEADS)
    kv_head = head - HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    position = tl.load(positions_ptr + token, mask=slot >= 0, other=0)
    channel = tl.arange(0, HALF_BLOCK)[None, :]
    is_q = ((slot >= 0) & (head < HEADS))[:, None] & (channel < HALF)
    is_k = ((slot >= 0) & (head >= HEADS))[:, None] & (channel < HALF)
    angles = cos_sin_ptr + (position * HEAD)[:, None] + channel
    cos = tl.load(angles, mask=is_q | is_k, other=0.0)
    sin = tl.load(angles + HALF, mask=is_q | is_k, other=0.0)
    wait_for_earlier_kernels(OVERLAPS)
    q_ptrs = q_ptr + (token * q_stride + head * HEAD)[:, None] + channel
    k_ptrs = k_ptr + (token * k_stride + kv_head * HEAD)[:, None] + channel
    v_ptrs = v_ptr + (token * v_stride + kv_head * HEAD)[:, None] + channel
    first = tl.where(
        is_q, tl.load(q_ptrs, mask=is_q, other=0.0), tl.load(k_ptrs, mask=is_k, other=0.0)
    ).to(tl.float32)
    second = tl.where(
        is_q,
        tl.load(q_ptrs + HALF, mask=is_q, other=0.0),
        tl.load(k_ptrs + HALF, mask=is_k, other=0.0),
    ).to(tl.float32)
    turned_first = rounded(tl.fma(first, cos, -(second * sin)), q_ptr.dtype.element_ty)
    turned_second = rounded(tl.fma(second, cos, first * sin), q_ptr.dtype.element_ty)
    tl.store(q_ptrs, turned_first, mask=is_q)
    tl.store(q_ptrs + HALF, turned_second, mask=is_q)
    block = slot // BLOCK_SIZE
    cache_row = (block * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    k_to = cache_ptr + (cache_row * HEAD)[:, None] + channel
    v_first = tl.load(v_ptrs, mask=is_k, other=0.0)
    v_second = tl.load(v_ptrs + HALF, mask=is_k, other=0.0)
    # 0 for finite values, NaN for all others
    residue = (v_first.to(tl.float32) * 0.0) + (v_second.to(tl.float32) * 0.0)
    broken = tl.max(tl.where(residue == 0.0, 0, 1), axis=1)[:, None] > 0
    nan = rounded(tl.full(broken.shape, float("nan"), tl.float32), cache_ptr.dtype.element_ty)
    tl.store(k_to, tl.where(broken, nan, turned_first), mask=is_k)
    tl.store(k_to + HALF, tl.where(broken, nan, turned_second), mask=is_k)
    v_to = k_to + KV_HEADS * BLOCK_SIZE * HEAD
    tl.store(v_to, tl.where(broken, tl.zeros_like(v_first), v_first), mask=is_k)
    tl.store(v_to + HALF, tl.where(broken, tl.zeros_like(v_second), v_second), mask=is_k)


def rotary_and_write_kv_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    machine: Machine,
) -> Launch:
    num_tokens, num_heads, head_size = q.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    half_block = triton.next_power_of_2(head_size // 2)
    rows = machine.row_elements // half_block
    return Launch(
        rotary_and_write_kv_kernel,
        (triton.cdiv(num_tokens * (num_heads + num_kv_heads), rows),),
        {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "cos_sin_ptr": cos_sin,
            "positions_ptr": positions,
            "cache_ptr": kv_cache,
            "slot_mapping_ptr": slot_mapping,
            "num_tokens": num_tokens,
            "q_stride": token_stride(q),
            "k_stride": token_stride(k),
            "v_stride": token_stride(v),
        },
        {
            "HEAD": head_size,
            "HALF_BLOCK": half_block,
            "HEADS": num_heads,
            "KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": block_size,
            "ROWS": rows,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=4,
    )


def token_stride(rows: Tensor) -> int:
    """Elements from one token's heads to the next one's; the heads themselves lie side by side."""
    token, head, element = rows.stride()
    _, num_heads, head_size = rows.shape
    side_by_side = element == 1 and (head == head_size or num_heads == 1)
    assert side_by_side, f"heads of {head_size} at strides {rows.stride()}"
    return token
