"""What the kernels of paged attention and of its KV cache do."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lora_serve.ops.contract.packed import AttentionPlanT


class AttentionKernels(Protocol[AttentionPlanT]):
    """Paged attention with its KV cache, whose layout is the backend's own."""

    def new_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        /,
    ) -> Tensor:
        """Allocate one layer's cache (num_blocks, 2 for K and V, num_kv_heads, …), uninitialised.

        What a head's part looks like belongs to the backend, and tiers move it as bytes.

        Raises:
            ConfigError: for a block or head size that the kernels cannot take.
        """

    def rotary_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        /,
    ) -> None:
        """Rotate q in place, and write rotated k, and v, to the cache.

        Args:
            q: (T, Hq, D), and k and v (T, Hkv, D): heads side by side, tokens at any stride.
            cos_sin: (P, D), float32: the cosines of position p's angles, then their sines. The
                halves of a head turn together (neox).
            positions: (T), int64.
            kv_cache: from new_kv_cache.
            slot_mapping: (T), int64: block_id * block_size + offset.
        """

    def plan_attention(
        self, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int, /
    ) -> AttentionPlanT:
        """Plan a step's attention, once a step, for all layers; int32 tensors on the CPU.

        Args:
            query_start_loc: (R + 1): request r's queries are rows [loc[r], loc[r + 1]).
            seq_lens: (R): its queries are the last of so many positions.
            block_tables: (R, any): where those positions lie.
            block_size: of the cache.
        """

    def paged_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlanT,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        /,
    ) -> Tensor:
        """Attend from q (T, Hq, D), at any stride of tokens -> (T, Hq, D), newly allocated.

        Causal: the query at position p sees [0, p], or (p - sliding_window, p]. Scores are
        scale * q . k, or softcap * tanh(scale * q . k / softcap). Blocks that lie before what any
        of a request's queries sees may hold anything, and need not be the request's.

        sinks: (Hq), float32, contiguous: the score of one position more, which every query of the
        head sees and which has no value.
        """
