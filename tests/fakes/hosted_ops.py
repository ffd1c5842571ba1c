"""A card's kernels for tensors of the host: tests of kernels need not know where they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lora_serve.ops.contract import (
    AttentionPlan,
    ChosenExperts,
    ExpertKernels,
    LoRAPart,
    LoRAPlan,
    Ops,
    PackedAdapter,
    PackedExperts,
    PackedLinear,
)


class HostedOps:
    """KV caches stay on the card; everything else is brought there and back in each call."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.plan_lora = ops.adapters.plan_lora
        self.new_kv_cache = ops.attention.new_kv_cache
        self.plan_attention = ops.attention.plan_attention

    def ops(self) -> Ops:
        experts = HostedExperts(self._ops.experts, self._ops.device)
        return replace(
            self._ops,
            rowwise=self,
            linears=self,
            experts=experts,
            adapters=self,
            attention=self,
            plan_pairs=self.plan_pairs if self._ops.plan_pairs is not None else None,
        )

    def _up(self, host: Tensor) -> Tensor:
        return host.to(self._ops.device)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return self._ops.linears.pack_linear(
            self._up(weight), None if bias is None else self._up(bias)
        )

    def pack_rows(self, weight: Tensor) -> PackedLinear:
        return self._ops.linears.pack_rows(self._up(weight))

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._ops.linears.linear(self._up(x), packed).cpu()

    def pack_adapter(self, linears: Sequence[Sequence[LoRAPart]]) -> PackedAdapter:
        return self._ops.adapters.pack_adapter(
            [
                [replace(part, a=self._up(part.a), b=self._up(part.b)) for part in parts]
                for parts in linears
            ]
        )

    def plan_pairs(
        self, changes: Sequence[tuple[int, int, Sequence[PackedAdapter]]], chosen: ChosenExperts
    ) -> tuple[Tensor, LoRAPlan]:
        assert self._ops.plan_pairs is not None
        there = ChosenExperts(self._up(chosen.ids), self._up(chosen.weights))
        pairs, plan = self._ops.plan_pairs(changes, there)
        return pairs.cpu(), plan

    def lora(self, y: Tensor, x: Tensor, plan: LoRAPlan, linear_index: int) -> None:
        there = self._up(y).clone()
        self._ops.adapters.lora(there, self._up(x), plan, linear_index)
        y.copy_(there)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops.rowwise.rms_norm(self._up(x), self._up(weight), eps).cpu()

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        there = self._up(residual).clone()
        normed = self._ops.rowwise.add_rms_norm(self._up(x), there, self._up(weight), eps)
        residual.copy_(there)
        return normed.cpu()

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        there = None if bias is None else self._up(bias)
        return self._ops.rowwise.layer_norm(self._up(x), self._up(weight), there, eps).cpu()

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.copy_(self._ops.rowwise.add(self._up(x), self._up(residual).clone()))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.copy_(self._ops.rowwise.scale(self._up(x).clone(), factor))

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._ops.rowwise.silu_and_mul(self._up(x)).cpu()

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        return self._ops.rowwise.gelu_tanh_and_mul(self._up(x)).cpu()

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return x.copy_(self._ops.rowwise.gelu_tanh(self._up(x).clone()))

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        return logits.copy_(self._ops.rowwise.soft_cap(self._up(logits).clone(), cap))

    def embed(self, weight: Tensor, input_ids: Tensor, scale: float | None) -> Tensor:
        return self._ops.rowwise.embed(self._up(weight), self._up(input_ids), scale).cpu()

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
        there = self._up(q).clone()
        rest = [self._up(host) for host in (k, v, cos_sin, positions)]
        self._ops.attention.rotary_and_write_kv(there, *rest, kv_cache, self._up(slot_mapping))
        q.copy_(there)

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
        there, sinks = self._up(q), None if sinks is None else self._up(sinks)
        return self._ops.attention.paged_attention(
            there, kv_cache, plan, scale, window, softcap, sinks
        ).cpu()


class HostedExperts:
    """The same for mixtures of experts."""

    def __init__(
        self, kernels: ExpertKernels[PackedLinear, PackedExperts], device: torch.device
    ) -> None:
        self._kernels = kernels
        self._device = device
        self.pack_experts = kernels.pack_experts

    def _up(self, host: Tensor) -> Tensor:
        return host.to(self._device)

    def _chosen(self, chosen: ChosenExperts) -> ChosenExperts:
        return ChosenExperts(self._up(chosen.ids), self._up(chosen.weights))

    def pack_gate(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return self._kernels.pack_gate(self._up(weight), None if bias is None else self._up(bias))

    def gate(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._kernels.gate(self._up(x), packed).cpu()

    def choose(self, logits: Tensor, num_chosen: int, among_chosen: bool) -> ChosenExperts:
        chosen = self._kernels.choose(self._up(logits), num_chosen, among_chosen)
        return ChosenExperts(chosen.ids.cpu(), chosen.weights.cpu())

    def linear(self, x: Tensor, packed: PackedExperts, chosen: ChosenExperts) -> Tensor:
        return self._kernels.linear(self._up(x), packed, self._chosen(chosen)).cpu()

    def combine(self, x: Tensor, chosen: ChosenExperts) -> Tensor:
        return self._kernels.combine(self._up(x), self._chosen(chosen)).cpu()

    def add_gated(self, x: Tensor, logits: Tensor, total: Tensor) -> Tensor:
        there = self._kernels.add_gated(self._up(x), self._up(logits), self._up(total).clone())
        return total.copy_(there)
