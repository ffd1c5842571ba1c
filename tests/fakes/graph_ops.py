"""Any backend's kernels with plans that can be filled again, as recorded steps need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lora_serve.ops.contract import AttentionPlan, LoRAPlan, Ops, PackedAdapter
from lora_serve.ops.recorded_steps import Int32Array


@dataclass(slots=True)
class HeldAttention:
    """The box is what lives at one address; `plan` is what was filled in last, None if nothing."""

    num_rows: int
    max_blocks: int
    block_size: int
    is_decode: bool
    num_taken: int = 0
    plan: AttentionPlan = None


@dataclass(slots=True)
class HeldLoRA:
    num_rows: int
    plan: LoRAPlan = None


class RecordableOps:
    """`ops` whose kernels also take held plans; padding rows touch nothing, as it must be."""

    new_attention_plan = HeldAttention
    new_lora_plan = HeldLoRA

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.pack_adapter = ops.adapters.pack_adapter
        self.plan_lora = ops.adapters.plan_lora
        self.new_kv_cache = ops.attention.new_kv_cache
        self.plan_attention = ops.attention.plan_attention

    def ops(self) -> Ops:
        return replace(self._ops, adapters=self, attention=self, graph_plans=self, record=None)

    def fill_attention_plan(
        self,
        plan: HeldAttention,
        query_start_loc: Int32Array,
        seq_lens: Int32Array,
        block_tables: Int32Array,
    ) -> None:
        plan.num_taken = int(query_start_loc[-1])
        assert plan.num_taken <= plan.num_rows, "more rows than the plan holds"
        assert block_tables.shape[1] <= plan.max_blocks, "more blocks than the plan holds"
        assert not plan.is_decode or plan.num_taken == len(seq_lens), "a request of several rows"
        plan.plan = self._ops.attention.plan_attention(
            *map(torch.from_numpy, (query_start_loc, seq_lens, block_tables)), plan.block_size
        )

    def fill_lora_plan(
        self, plan: HeldLoRA, segments: Sequence[tuple[int, int, PackedAdapter]]
    ) -> None:
        plan.plan = self._ops.adapters.plan_lora(segments, plan.num_rows) if segments else None

    def rotary_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
    ) -> None:
        n = int((slots >= 0).sum())
        assert bool((slots[:n] >= 0).all()), "padding stands before a request's row"
        if n:
            self._ops.attention.rotary_and_write_kv(
                q[:n], k[:n], v[:n], cos_sin, positions[:n], kv_cache, slots[:n]
            )

    def paged_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        attend = self._ops.attention.paged_attention
        if not isinstance(plan, HeldAttention):
            return attend(q, kv_cache, plan, scale, window, softcap, sinks)
        out = torch.zeros(q.shape, dtype=q.dtype)
        if n := plan.num_taken:
            out[:n] = attend(q[:n], kv_cache, plan.plan, scale, window, softcap, sinks)
        return out

    def lora(self, y: Tensor, x: Tensor, plan: LoRAPlan, linear_index: int) -> None:
        held = plan.plan if isinstance(plan, HeldLoRA) else plan
        if held is not None:
            self._ops.adapters.lora(y, x, held, linear_index)
