"""The MLPs: gated and plain."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.linear import Linear, RowsLinear
from lora_serve.ops.contract import Ops


class GatedMLP:
    """down(act(gate x) * up x).

    activation: act, as `gated_activation` has it.
    """

    def __init__(self, ops: Ops, gate_up: Linear, activation: str, down: RowsLinear) -> None:
        self._gate_up = gate_up
        self._act_and_mul = gated_activation(ops, activation)
        self._fused = gate_up.fused_with(activation)
        self._down = down

    def __call__(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor:
        """x: (T, H), of `rows` -> (T, H)."""
        return self._down(self._inner(x, rows), rows)

    def _inner(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor:
        if self._fused is not None and rows.lora is None and not rows.biases:
            return self._fused(x)
        return self._act_and_mul(self._gate_up(x, rows))


class PlainMLP:
    """down(act(up x)).

    act: of (T, I), may work in place, such as Ops.gelu_tanh.
    """

    def __init__(self, up: Linear, act: Callable[[Tensor], Tensor], down: RowsLinear) -> None:
        self._up = up
        self._act = act
        self._down = down

    def __call__(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor:
        return self._down(self._act(self._up(x, rows)), rows)


def gated_activation(ops: Ops, name: str) -> Callable[[Tensor], Tensor]:
    """Find act(gate) * up of (T, 2 I), the gate first -> (T, I). name: silu or gelu_tanh."""
    rowwise = ops.rowwise
    return {"silu": rowwise.silu_and_mul, "gelu_tanh": rowwise.gelu_tanh_and_mul}[name]
