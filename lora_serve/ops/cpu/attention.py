"""The native paged attention, and the KV cache in its own layout (csrc/cpu/kv_layout.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.ops._cpu import Backend, use_huge_pages
from lora_serve.ops.cpu import plans
from lora_serve.ops.cpu.dtypes import DTYPE_CODES, dtype_code
from lora_serve.ops.cpu.plans import AttentionStep
from lora_serve.ops.cpu.recording import Recorder
from lora_serve.ops.cpu.strides import token_stride

GROUP = 16  # tokens that lie side by side in the KV cache
MAX_HEAD_SIZE = 256


class CpuAttention:
    """`AttentionKernels` on one path."""

    plan_attention = staticmethod(plans.plan_attention)

    def __init__(self, native: Backend, recorder: Recorder) -> None:
        self._native = native
        self._recorder = recorder

    def new_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """(blocks, 2 for K and V, kv heads, groups of 16 tokens, 16 * head_size), uninitialised.

        Raises:
            ConfigError: for a block or head size that is no multiple of 16, or too large a head.
        """
        dtype_code(dtype)
        if block_size % GROUP or block_size < GROUP:
            raise ConfigError(
                f"--block-size {block_size}: the CPU kernels need a multiple of {GROUP}"
            )
        if head_size % GROUP or not GROUP <= head_size <= MAX_HEAD_SIZE:
            raise ConfigError(
                f"head size {head_size}: the CPU kernels need a multiple of {GROUP} up to "
                f"{MAX_HEAD_SIZE}; --override-op paged_attention=reference serves others, slowly"
            )
        shape = (num_blocks, 2, num_kv_heads, block_size // GROUP, GROUP * head_size)
        cache = torch.empty(shape, dtype=dtype)
        use_huge_pages(cache.data_ptr(), cache.numel() * cache.element_size())
        return cache

    def rotary_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        tokens, num_heads, head_size = q.shape
        _, _, num_kv_heads, groups, _ = kv_cache.shape
        self._native.rotary_and_write_kv(
            DTYPE_CODES[q.dtype],
            q.data_ptr(),
            token_stride(q, head_size),
            k.data_ptr(),
            token_stride(k, head_size),
            v.data_ptr(),
            token_stride(v, head_size),
            cos_sin.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            kv_cache.data_ptr(),
            groups * GROUP,
            num_kv_heads,
            head_size,
            tokens,
            num_heads,
        )

    def paged_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        plan: AttentionStep,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert softcap is None or softcap > 0, f"scores capped at {softcap}"
        tokens, num_heads, head_size = q.shape
        _, _, num_kv_heads, groups, _ = kv_cache.shape
        out = self._recorder.new(tokens, num_heads, head_size, dtype=q.dtype)
        call = (
            DTYPE_CODES[q.dtype],
            q.data_ptr(),
            token_stride(q, head_size),
            out.data_ptr(),
            kv_cache.data_ptr(),
            groups * GROUP,
            num_kv_heads,
            head_size,
            plan.native,
            num_heads,
            scale,
            sliding_window or 0,
            softcap or 0.0,
        )
        if sinks is None:
            self._native.attention(*call)
        else:
            assert sinks.dtype == torch.float32, f"sinks of {sinks.dtype}"
            assert sinks.shape == (num_heads,), f"sinks {tuple(sinks.shape)}, {num_heads} heads"
            self._native.attention_with_sinks(*call, sinks.data_ptr())
        return out
