"""The gated MLP."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.linear import Linear


class GatedMLP:
    """down(act(gate x) * up x).

    act_and_mul: (T, 2 I) -> (T, I), such as Ops.silu_and_mul.
    """

    def __init__(
        self, gate_up: Linear, act_and_mul: Callable[[Tensor], Tensor], down: Linear
    ) -> None:
        self._gate_up = gate_up
        self._act_and_mul = act_and_mul
        self._down = down

    def __call__(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor:
        return self._down(self._act_and_mul(self._gate_up(x, rows)), rows)
