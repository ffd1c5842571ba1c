"""The MLPs: gated and plain."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.linear import Linear, RowsLinear


class GatedMLP:
    """down(act(gate x) * up x).

    act_and_mul: (T, 2 I) -> (T, I), such as Ops.silu_and_mul.
    """

    def __init__(
        self, gate_up: Linear, act_and_mul: Callable[[Tensor], Tensor], down: RowsLinear
    ) -> None:
        self._gate_up = gate_up
        self._act_and_mul = act_and_mul
        self._down = down

    def __call__(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor:
        return self._down(self._act_and_mul(self._gate_up(x, rows)), rows)


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
