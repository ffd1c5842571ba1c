"""The mixture of experts: gated MLPs of which each row takes a few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.expert_lora import ExpertDeltas
from lora_serve.layers.gather import Gather
from lora_serve.layers.mlp import GatedMLP
from lora_serve.ops.contract import Ops, PackedExperts, PackedLinear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that all rows take.

    gate: says how much of it; from pack_gate, of one output. None: all of it.
    """

    mlp: GatedMLP
    gate: PackedLinear | None


class ExpertsMLP:
    """The sum over a row's experts of weight * down(act(gate x) * up x), and the shared one's part.

    gate: from pack_gate, an output for each expert. num_chosen, among_chosen: as
    ExpertKernels.choose has them. lora_index: the number of gate_up among an expert's layers, which
    finds its deltas; down has the next. gather_in, gather_out: where ranks share what lies between
    an expert's layers, and what they give; weights are then this rank's outputs.
    """

    def __init__(
        self,
        ops: Ops,
        gate: PackedLinear,
        gate_up: PackedExperts,
        act_and_mul: Callable[[Tensor], Tensor],
        down: PackedExperts,
        *,
        num_chosen: int,
        among_chosen: bool,
        shared: SharedExpert | None,
        lora_index: int,
        gather_in: Gather | None = None,
        gather_out: Gather | None = None,
    ) -> None:
        self._ops = ops
        self._experts = ops.experts
        self._gate = gate
        self._gate_up = gate_up
        self._act_and_mul = act_and_mul
        self._down = down
        self._num_chosen = num_chosen
        self._among_chosen = among_chosen
        self._shared = shared
        self._lora_index = lora_index
        self._gather_in = gather_in
        self._gather_out = gather_out

    def __call__(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor:
        """x: (T, H), of `rows` -> (T, H)."""
        experts, shared = self._experts, self._shared
        logits = experts.gate(x, self._gate)
        chosen = experts.choose(logits, self._num_chosen, self._among_chosen)
        deltas = ExpertDeltas(self._ops, rows.experts, chosen) if rows.experts else None
        pairs = experts.linear(x, self._gate_up, chosen)
        if deltas is not None:
            deltas.add(pairs, x, self._lora_index)
        hidden = self._act_and_mul(pairs)
        if self._gather_in is not None:
            hidden = self._gather_in(hidden)
        pairs = experts.linear(hidden, self._down, chosen)
        if deltas is not None:
            deltas.add(pairs, hidden, self._lora_index + 1)
        mixed = experts.combine(pairs, chosen)
        if self._gather_out is not None:
            mixed = self._gather_out(mixed)
        if shared is None:
            return mixed
        added = shared.mlp(x, rows)
        if shared.gate is None:
            return self._ops.rowwise.add(added, mixed)
        return experts.add_gated(added, experts.gate(x, shared.gate), mixed)
