"""Vectors that adapters add to what linear layers give, for their rows of a batch alone.

As deltas: an adapter that replaces a layer's bias adds the difference. Outputs are rounded once
more. Steps with such an adapter run without a recorded graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

# (out_features) of linear layers, float32, by their index.
LayerBiases = Mapping[int, Tensor]
# (start, end, biases), disjoint ranges of rows in ascending order.
BiasChanges = Sequence[tuple[int, int, LayerBiases]]


def add_biases(y: Tensor, changes: BiasChanges, index: int) -> None:
    """Add to y (T, out) of linear layer `index`, in place."""
    for start, end, biases in changes:
        if index in biases:
            y[start:end] += biases[index]
