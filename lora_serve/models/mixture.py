"""Mixtures of experts in the place of MLPs: their facts, and what they are called.

Checkpoints have a tensor for each projection of each expert, or `joint_experts` for all of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_serve.layers.limited_swiglu import SwiGLULimits
from lora_serve.models.base import LinearLayout
from lora_serve.models.joint_experts import GPT_OSS, JointExperts


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a mixture's tensors are called within a decoder layer, without `.weight`.

    shared: its projections are called as a dense layer's are. shared_gate: None where it counts
    whole.
    """

    gate: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate_proj: str = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str | None = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True)
class Mixture:
    """The facts of a model's mixtures of experts.

    num_chosen: experts that each row takes. among_chosen: as ExpertKernels.choose has it.
    intermediate_size: of one expert. layers: those that have a mixture; others have an MLP.
    shared_size: the intermediate size of the expert that all rows take; None: there is none.
    are_joint: whether the experts of a layer lie together, as `joint` says; where they have biases,
    so has the gate. swiglu: of that activation; None: experts have the model's.
    """

    num_experts: int
    num_chosen: int
    among_chosen: bool
    intermediate_size: int
    layers: tuple[int, ...]
    shared_size: int | None = None
    names: ExpertNames = ExpertNames()
    are_joint: bool = False
    swiglu: SwiGLULimits | None = None
    joint: JointExperts = GPT_OSS

    @property
    def gate_has_bias(self) -> bool:
        return self.are_joint and self.joint.has_biases

    def shapes(self, prefix: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors, but for the shared expert's own linear layers.

        prefix: the layer's name.
        """
        inner, names = self.intermediate_size, self.names
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}.{names.gate}.weight": (self.num_experts, hidden_size)
        }
        if self.gate_has_bias:
            shapes[f"{prefix}.{names.gate}.bias"] = (self.num_experts,)
        if self.are_joint:
            shapes |= self.joint.shapes(prefix, self.num_experts, hidden_size, inner)
        else:
            for expert in self.experts(prefix):
                shapes[f"{expert}.{names.gate_proj}.weight"] = (inner, hidden_size)
                shapes[f"{expert}.{names.up_proj}.weight"] = (inner, hidden_size)
                shapes[f"{expert}.{names.down_proj}.weight"] = (hidden_size, inner)
        if self.shared_size is not None and names.shared_gate is not None:
            shapes[f"{prefix}.{names.shared_gate}.weight"] = (1, hidden_size)
        return shapes

    def lora_index(self, layer: int) -> int:
        """The index of the first of the two linear layers that an expert of the layer has."""
        return 2 * self.layers.index(layer)

    def linears(self, prefix: str, hidden_size: int, index: int) -> Iterator[LinearLayout]:
        """The linear layers of a layer's experts: gate and up are one. index: of the first.

        prefix: the layer's name.
        """
        inner, names = self.intermediate_size, self.names
        for number, expert in enumerate(self.experts(prefix)):
            into = (f"{expert}.{names.gate_proj}", inner), (f"{expert}.{names.up_proj}", inner)
            out = (f"{expert}.{names.down_proj}", hidden_size)
            yield LinearLayout(index, into, hidden_size, has_bias=False, expert=number)
            yield LinearLayout(index + 1, (out,), inner, has_bias=False, expert=number)

    def experts(self, prefix: str) -> Iterator[str]:
        """The names of a layer's experts. prefix: the layer's name."""
        return (f"{prefix}.{self.names.experts}.{index}" for index in range(self.num_experts))
