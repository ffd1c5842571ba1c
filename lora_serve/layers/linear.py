"""A linear layer, and the one place where adapters act.

Several projections of one input (q k v, or gate up) are one layer, so that there is one product;
an adapter's deltas address the projections by their first output column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.biases import add_biases
from lora_serve.layers.gather import Gather
from lora_serve.ops.contract import Ops, PackedLinear
from lora_serve.ops.quantization import QuantizedWeight


class RowsLinear(Protocol):
    """What gives rows for rows, and knows whose they are."""

    def __call__(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor: ...


class Linear:
    """y = x W^T + bias + each row's own low-rank delta, and its adapter's bias.

    weight: codes only where `ops` packs them. index: number of this layer among all linear layers
    of the model, which finds its deltas. gather_in, gather_out: where ranks share the rows x, or y.
    """

    def __init__(
        self,
        ops: Ops,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        index: int,
        gather_in: Gather | None = None,
        gather_out: Gather | None = None,
    ) -> None:
        self._ops = ops
        self._gather_in = gather_in
        self._gather_out = gather_out
        self._packed = packed(ops, weight, bias)
        self._index = index

    def __call__(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor:
        """x: (T, in), of `rows` -> (T, out); of each the rank's share where it is not gathered."""
        if self._gather_in is not None:
            x = self._gather_in(x)
        y = self._ops.linears.linear(x, self._packed)
        if rows.lora is not None:
            self._ops.adapters.lora(y, x, rows.lora, self._index)
        if rows.biases:
            add_biases(y, rows.biases, self._index)
        return y if self._gather_out is None else self._gather_out(y)

    def fused_with(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """This layer and its gated activation as one kernel, for rows that nothing is added to."""
        fuse = self._ops.fuse_gated
        if fuse is None or self._gather_in is not None or self._gather_out is not None:
            return None
        return fuse(self._packed, activation)


def packed(ops: Ops, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> PackedLinear:
    """A weight as the kernels take it."""
    if not isinstance(weight, QuantizedWeight):
        return ops.linears.pack_linear(weight, bias)
    assert ops.pack_codes is not None, f"{ops.name} has no kernels for codes"
    return ops.pack_codes(weight, bias)
