"""Experts of which a checkpoint has one tensor for a whole layer, as gpt-oss's.

    gate_up_proj (E, hidden, 2 inner) with gate_up_proj_bias (E, 2 inner): outputs 2 i are the
    gate's, outputs 2 i + 1 are up's. down_proj (E, inner, hidden) with down_proj_bias (E, hidden).

Stored codes have the rows of all experts one below the other: (E out, in).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lora_serve.models.base import Weights
from lora_serve.ops.quantization import QuantizedWeight, rows_of_all

GATE_UP, DOWN = "gate_up_proj", "down_proj"


def joint_shapes(
    name: str, num_experts: int, hidden_size: int, inner: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors. name: of its experts."""
    return {
        f"{name}.{GATE_UP}": (num_experts, hidden_size, 2 * inner),
        f"{name}.{GATE_UP}_bias": (num_experts, 2 * inner),
        f"{name}.{DOWN}": (num_experts, inner, hidden_size),
        f"{name}.{DOWN}_bias": (num_experts, hidden_size),
    }


def take_gate_up(
    weights: Weights, name: str, share: range
) -> Iterator[tuple[Tensor | QuantizedWeight, Tensor]]:
    """Each expert's weight and bias: the gate's outputs of `share`, below them up's."""

    def own(rows: Tensor) -> Tensor:
        parts = [rows[first::2][share.start : share.stop] for first in (0, 1)]
        return rows_of_all(parts) if rows.dim() == 2 else torch.cat(parts)

    return _taken(weights, f"{name}.{GATE_UP}", own)


def take_down(
    weights: Weights, name: str, share: range
) -> Iterator[tuple[Tensor | QuantizedWeight, Tensor]]:
    """Each expert's weight and bias: the outputs of `share`."""
    return _taken(weights, f"{name}.{DOWN}", lambda rows: rows[share.start : share.stop])


def _taken(
    weights: Weights, name: str, own: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Tensor | QuantizedWeight, Tensor]]:
    """own: chooses a rank's among an expert's outputs."""
    biases = weights.take(f"{name}_bias")
    whole = weights.take_matrix(name)
    num_rows = biases.shape[1]
    for expert, bias in enumerate(biases):
        weight: Tensor | QuantizedWeight
        if isinstance(whole, QuantizedWeight):
            rows = slice(expert * num_rows, (expert + 1) * num_rows)
            weight = whole.with_rows(partial(_own_rows, rows, own))
        else:
            weight = own(whole[expert].t())
        yield weight, own(bias)


def _own_rows(rows: slice, own: Callable[[Tensor], Tensor], all_rows: Tensor) -> Tensor:
    return own(all_rows[rows])
