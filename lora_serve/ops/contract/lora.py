"""What kernels add to linear layers and experts for adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lora_serve.ops.contract.experts import ChosenExperts
from lora_serve.ops.contract.packed import AdapterInT, AdapterT, LoRAPlanOutT, LoRAPlanT


@dataclass(frozen=True, slots=True)
class LoRAPart:
    """One projection's delta inside a (possibly fused) linear layer.

    y[:, out_start : out_start + b.shape[0]] += scale * (x @ a.T) @ b.T

    a: (rank, in_features), model dtype, contiguous. b: (out_features, rank), likewise.
    """

    a: Tensor
    b: Tensor
    scale: float
    out_start: int


class LoRAKernels(Protocol[AdapterT, LoRAPlanT]):
    """What adapters add to linear layers."""

    def pack_adapter(self, linears: Sequence[Sequence[LoRAPart]], /) -> AdapterT:
        """Pack an adapter. linears[i]: the parts of linear layer i."""

    def plan_lora(
        self, segments: Sequence[tuple[int, int, AdapterT]], num_tokens: int, /
    ) -> LoRAPlanT:
        """Plan a step's deltas, once a step.

        segments: (start, end, adapter), disjoint row ranges in ascending order. Rows outside them
            have no adapter.
        """

    def lora(self, y: Tensor, x: Tensor, plan: LoRAPlanT, linear_index: int, /) -> None:
        """Add every segment's delta of x (T, in) to y (T, out), contiguous, in place.

        The hidden x @ a.T stays float32; the delta is added in float32 and y rounded once.
        """


class PlanPairs(Protocol[AdapterInT, LoRAPlanOutT]):
    """Plans the deltas of experts without the host's knowing which experts were chosen."""

    def __call__(
        self,
        changes: Sequence[tuple[int, int, Sequence[AdapterInT]]],
        chosen: ChosenExperts,
        /,
    ) -> tuple[Tensor, LoRAPlanOutT]:
        """Bring the pairs of each adapter and expert side by side, and plan their deltas.

        changes: (start, end, adapters), at least one: disjoint ranges of chosen's rows in ascending
            order, and the adapter of each expert.

        Returns:
            The pairs of these rows in their new order, int64, and the plan of the deltas of rows
            that stand in it.
        """
