"""Experts of which a checkpoint has two tensors for a whole layer, as gpt-oss's and Granite's.

`JointExperts` says how they lie. Stored codes have the rows of all experts one below the other:
(E out, in).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lora_serve.models.base import Weights
from lora_serve.ops.quantization import QuantizedWeight, rows_of_all


@dataclass(frozen=True, slots=True)
class JointExperts:
    """The two tensors of a layer. What has a default is gpt-oss's.

    gate_up, down: their names within the layer. outputs_first: whether they are (E, out, in), the
    gate's outputs before up's; else they are (E, in, out), where outputs 2 i are the gate's and
    2 i + 1 up's. has_biases: whether there is one for each, (E, out).
    """

    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    outputs_first: bool = False
    has_biases: bool = True

    def shapes(
        self, prefix: str, num_experts: int, hidden_size: int, inner: int
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors. prefix: the layer's name."""
        sizes = {self.gate_up: (2 * inner, hidden_size), self.down: (hidden_size, inner)}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (out, into) in sizes.items():
            matrix = (out, into) if self.outputs_first else (into, out)
            shapes[f"{prefix}.{name}"] = (num_experts, *matrix)
            if self.has_biases:
                shapes[f"{prefix}.{name}_bias"] = (num_experts, out)
        return shapes

    def take_gate_up(
        self, weights: Weights, prefix: str, num_experts: int, share: range
    ) -> Iterator[tuple[Tensor | QuantizedWeight, Tensor | None]]:
        """Each expert's weight and bias: the gate's outputs of `share`, below them up's."""

        def own(rows: Tensor) -> Tensor:
            both = rows.chunk(2) if self.outputs_first else (rows[0::2], rows[1::2])
            parts = [each[share.start : share.stop] for each in both]
            return rows_of_all(parts) if rows.dim() == 2 else torch.cat(parts)

        return self._taken(weights, f"{prefix}.{self.gate_up}", num_experts, own)

    def take_down(
        self, weights: Weights, prefix: str, num_experts: int, share: range
    ) -> Iterator[tuple[Tensor | QuantizedWeight, Tensor | None]]:
        """Each expert's weight and bias: the outputs of `share`."""
        rows = slice(share.start, share.stop)
        return self._taken(weights, f"{prefix}.{self.down}", num_experts, lambda each: each[rows])

    def _taken(
        self, weights: Weights, name: str, num_experts: int, own: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Tensor | QuantizedWeight, Tensor | None]]:
        """own: chooses a rank's among an expert's outputs."""
        biases = weights.take(f"{name}_bias") if self.has_biases else None
        whole = weights.take_matrix(name)
        for expert in range(num_experts):
            weight: Tensor | QuantizedWeight
            if isinstance(whole, QuantizedWeight):
                num_rows = len(whole.codes) // num_experts
                rows = slice(expert * num_rows, (expert + 1) * num_rows)
                weight = whole.with_rows(partial(_own_rows, rows, own))
            else:
                weight = own(whole[expert] if self.outputs_first else whole[expert].t())
            yield weight, None if biases is None else own(biases[expert])


GPT_OSS = JointExperts()


def _own_rows(rows: slice, own: Callable[[Tensor], Tensor], all_rows: Tensor) -> Tensor:
    return own(all_rows[rows])
