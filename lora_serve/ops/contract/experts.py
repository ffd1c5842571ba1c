"""What the kernels of mixtures of experts do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lora_serve.ops.contract.packed import ExpertsT, LinearT


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """The K experts that each of T rows takes, and how much of each.

    ids: (T, K), int32, a row's in the order in which it sums them. weights: (T, K), float32. Both
    contiguous. Row t and its j-th expert are pair t * K + j.
    """

    ids: Tensor
    weights: Tensor


class ExpertKernels(Protocol[LinearT, ExpertsT]):
    """Mixtures of experts: linear layers of which each row takes a few.

    Their weights are packed by `LinearKernels` of the same backend, and so may be quantised.
    """

    def pack_gate(self, weight: Tensor, bias: Tensor | None = None, /) -> LinearT:
        """Pack weight (N, H) and bias (N) of what decides between experts: never quantised."""

    def gate(self, x: Tensor, packed: LinearT, /) -> Tensor:
        """Give x @ weight.T + bias of x (T, H): (T, N), in the dtype."""

    def choose(self, logits: Tensor, num_chosen: int, among_chosen: bool, /) -> ChosenExperts:
        """Find the largest of each row of logits (T, E); of equal ones the first.

        among_chosen: whether a row's weights are the softmax of its chosen logits alone, or what
            the softmax of all its logits has there.
        """

    def pack_experts(self, experts: Sequence[LinearT], /) -> ExpertsT:
        """Bring packed linear layers of one shape together. May keep them."""

    def linear(self, x: Tensor, packed: ExpertsT, chosen: ChosenExperts, /) -> Tensor:
        """Give each pair's product with its expert's weight, as `LinearKernels.linear` does.

        x: (T, in), where all pairs of a row read it; or (T * K, in), a row for each pair.

        Returns:
            (T * K, out), newly allocated.
        """

    def combine(self, x: Tensor, chosen: ChosenExperts, /) -> Tensor:
        """Sum x (T * K, H), times their weights, over each row's pairs: (T, H), rounded once."""

    def add_gated(self, x: Tensor, logits: Tensor, total: Tensor, /) -> Tensor:
        """Add sigmoid(logits) * x to total in place, rounded once; return total.

        x, total: (T, H), contiguous. logits: (T, 1).
        """
