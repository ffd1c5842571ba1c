"""Makes the parts that all decoders have, out of a rank's shares of their weights.

A linear layer is divided by what it gives, never by what it takes: its outputs are whole sums.
Attention is divided by heads, the LM head by tokens, embeddings by columns, and each expert as a
linear layer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lora_serve.distributed.group import Group
from lora_serve.distributed.shares import Division, Evenly, RankPlace, place_of
from lora_serve.layers.attention import HeadLayout
from lora_serve.layers.divided_argmax import DividedArgmax
from lora_serve.layers.embedding import Embedding, LMHead
from lora_serve.layers.experts import ExpertsMLP, SharedExpert
from lora_serve.layers.gather import Gather
from lora_serve.layers.linear import Linear, RowsLinear, packed
from lora_serve.layers.mlp import GatedMLP
from lora_serve.layers.summed_linear import SummedLinear, SumOfRanks
from lora_serve.models.base import LinearLayout, Weights
from lora_serve.models.decoder_shape import EMBEDDING, LM_HEAD, DecoderShape
from lora_serve.models.mixture import Mixture
from lora_serve.ops.contract import Ops, PackedExperts, PackedLinear
from lora_serve.ops.cpu.memory import WeightMemory
from lora_serve.ops.quantization import QuantizedWeight, rows_of_all, stacked


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Takes the weights of a decoder; each of its parts is made once.

    memory: of matrices until they are packed.
    """

    shape: DecoderShape
    weights: Weights
    ops: Ops
    group: Group
    memory: WeightMemory = field(default_factory=WeightMemory)

    @property
    def heads(self) -> HeadLayout:
        """The heads of this rank."""
        shape, place = self.shape, self._place
        return HeadLayout(
            len(shape.heads.queries(place)),
            len(shape.heads.kv(place)),
            shape.head_size,
        )

    def embeddings(self) -> tuple[Tensor, Tensor | QuantizedWeight | None]:
        """This rank's columns of the embeddings, and its rows if they are the LM head, too."""
        shape, place = self.shape, self._place
        name = shape.named(EMBEDDING)
        weight = self.weights.take_table(name)
        columns = _own(weight, 1, place.share(shape.hidden_size))
        if not shape.tie_word_embeddings:
            return columns, None
        codes = self.weights.take_codes(name)
        rows = place.share(shape.vocab_size)
        return columns, _own_rows(weight if codes is None else codes, rows)

    def embedding(self, columns: Tensor, scale: float | None = None) -> Embedding:
        return Embedding(self.ops, columns, scale, self.gather(Evenly(self.shape.hidden_size)))

    def lm_head(
        self,
        tied: Tensor | QuantizedWeight | None,
        soft_cap: float | None = None,
        scale: float | None = None,
    ) -> LMHead:
        """tied: this rank's rows of the embeddings, if these are the LM head."""
        vocab_size = self.shape.vocab_size
        if tied is None:
            tied = _own_rows(self.weights.take_matrix(LM_HEAD), self._place.share(vocab_size))
        if self.group.world_size == 1:
            return LMHead(self.ops, tied, soft_cap, scale)
        argmax = partial(DividedArgmax, group=self.group, vocab_size=vocab_size)
        return LMHead(self.ops, tied, soft_cap, scale, self.gather(Evenly(vocab_size)), argmax)

    def linear(self, layout: LinearLayout) -> Linear:
        """A layer of whole rows, which gives this rank's share of each projection."""
        return self._linear(layout, None, None)

    def gathered_linear(self, layout: LinearLayout) -> RowsLinear:
        """A layer that takes what the ranks have of each row, and gives whole rows."""
        ((_, out_features),) = layout.projections
        if layout.is_sum:
            return self._summed_linear(layout)
        assert layout.inputs is not None, "it takes whole rows"
        gather_in = self.gather(layout.inputs, is_passing=True)
        return self._linear(layout, gather_in, self.gather(Evenly(out_features)))

    def _summed_linear(self, layout: LinearLayout) -> SummedLinear:
        ((name, out_features),) = layout.projections
        weight = self.weights.take_matrix(f"{name}.weight")
        # All segments are codes, or none: the same at every number of ranks.
        if isinstance(weight, QuantizedWeight) and not all(
            weight.has_columns(each.columns) for each in layout.segments()
        ):
            weight = self.weights.take_matrix(f"{name}.weight", may_be_codes=False)
        bias = self.weights.take(f"{name}.bias") if layout.has_bias else None
        own = []
        for each in layout.segments():
            if each.is_own(self._place):
                columns = _own_columns(weight, each.columns)
                linear = Linear(self.ops, columns, bias if each.has_bias else None, each.index)
                own.append((len(each.columns), linear))
        is_divided = self.group.world_size > 1
        total = SumOfRanks(self.ops, self.group, out_features) if is_divided else None
        return SummedLinear(self.ops, own, total)

    def _linear(
        self, layout: LinearLayout, gather_in: Gather | None, gather_out: Gather | None
    ) -> Linear:
        rows, order = layout.own_rows(self._place), layout.of_rank(self._place).head_order
        names = [name for name, _ in layout.projections]
        fused = self._joined(list(zip(names, rows, strict=True)))
        bias: Tensor | None = None
        if layout.has_bias:
            wholes = [self.weights.take(f"{name}.bias") for name in names]
            bias = torch.cat(
                [
                    _own(whole, 0, share)
                    for whole, shares in zip(wholes, rows, strict=True)
                    for share in shares
                ]
            )
        if order is not None:
            reorder = order.reorder
            fused = (
                fused.with_rows(reorder) if isinstance(fused, QuantizedWeight) else reorder(fused)
            )
            bias = None if bias is None else reorder(bias)
        return Linear(self.ops, fused, bias, layout.index, gather_in, gather_out)

    def experts(
        self,
        mixture: Mixture,
        layer: int,
        act_and_mul: Callable[[Tensor], Tensor],
        shared: GatedMLP | None,
    ) -> ExpertsMLP:
        """A layer's mixture, its weights taken one expert's at a time. shared: None for none.

        Gates lie on all ranks, which choose alike; gate and up of an expert are one linear layer.
        """
        names, prefix, ops = mixture.names, self.shape.named_layer(layer), self.ops
        hidden_size, inner = self.shape.hidden_size, mixture.intermediate_size
        pack_gate, experts = ops.experts.pack_gate, list(mixture.experts(prefix))
        gate = pack_gate(
            self.weights.take(f"{prefix}.{names.gate}.weight"),
            self.weights.take(f"{prefix}.{names.gate}.bias") if mixture.gate_has_bias else None,
        )
        if mixture.are_joint:
            joint, count, share = mixture.joint, mixture.num_experts, self._place.share
            gate_up = self._packed(joint.take_gate_up(self.weights, prefix, count, share(inner)))
            down = self._packed(joint.take_down(self.weights, prefix, count, share(hidden_size)))
        else:
            gate_up = self._expert_linears(experts, (names.gate_proj, names.up_proj), inner)
            down = self._expert_linears(experts, (names.down_proj,), hidden_size)
        shared_expert = None
        if shared is not None:
            shared_gate = None
            if names.shared_gate is not None:
                shared_gate = pack_gate(self.weights.take(f"{prefix}.{names.shared_gate}.weight"))
            shared_expert = SharedExpert(shared, shared_gate)
        return ExpertsMLP(
            ops,
            gate,
            gate_up,
            act_and_mul,
            down,
            num_chosen=mixture.num_chosen,
            among_chosen=mixture.among_chosen,
            shared=shared_expert,
            lora_index=mixture.lora_index(layer),
            gather_in=self.gather(Evenly(inner), is_passing=True),
            gather_out=self.gather(Evenly(hidden_size)),
        )

    def gather(self, division: Division, *, is_passing: bool = False) -> Gather | None:
        """Puts ranks' shares of rows side by side; None where there is one rank.

        is_passing: as Gather has it.
        """
        if self.group.world_size == 1:
            return None
        return Gather(self.ops, self.group, division, is_passing=is_passing)

    def _packed(
        self, experts: Iterable[tuple[Tensor | QuantizedWeight, Tensor | None]]
    ) -> PackedExperts:
        return self.ops.experts.pack_experts([packed(self.ops, *each) for each in experts])

    def _expert_linears(
        self, experts: Sequence[str], names: Sequence[str], out_features: int
    ) -> PackedExperts:
        """One linear layer of each expert: the codes of all, or of none.

        So codes wait for the last expert; one of floats makes floats of those before it.
        """
        shares = [self._place.share(out_features)]

        def take(expert: str, *, may_be_codes: bool) -> Tensor | QuantizedWeight:
            projections = [(f"{expert}.{name}", shares) for name in names]
            return self._joined(projections, may_be_codes=may_be_codes)

        codes: list[QuantizedWeight] = []
        linears: list[PackedLinear] = []
        for index, expert in enumerate(experts):
            weight = take(expert, may_be_codes=len(codes) == index)
            if isinstance(weight, QuantizedWeight):
                codes.append(weight)
                continue
            if codes:
                earlier = (take(each, may_be_codes=False) for each in experts[:index])
                linears = [packed(self.ops, each, None) for each in earlier]
                codes.clear()
            linears.append(packed(self.ops, weight, None))
        linears += [packed(self.ops, each, None) for each in codes]
        return self.ops.experts.pack_experts(linears)

    def _joined(
        self, projections: Sequence[tuple[str, Sequence[range]]], *, may_be_codes: bool = True
    ) -> Tensor | QuantizedWeight:
        """Shares of the outputs of projections, side by side: the codes of all, or the floats."""
        codes: list[QuantizedWeight] = []
        floats: list[Tensor] = []
        for name, shares in projections:
            whole = self.weights.take_matrix(f"{name}.weight", may_be_codes=may_be_codes)
            for share in shares:
                if isinstance(whole, QuantizedWeight):
                    codes.append(_own_codes(whole, share))
                else:
                    floats.append(_own(whole, 0, share))
        if not floats:
            return stacked(codes, self.memory.take)
        if codes:
            return self._joined(projections, may_be_codes=False)
        return floats[0] if len(floats) == 1 else rows_of_all(floats, self.memory.take)

    @property
    def _place(self) -> RankPlace:
        return place_of(self.group)


def _own(weight: Tensor, dim: int, share: range) -> Tensor:
    """A rank's share of what one dimension has; the rest of the memory is given back."""
    if len(share) == weight.shape[dim]:
        return weight
    return weight.narrow(dim, share.start, len(share)).clone(memory_format=torch.contiguous_format)


def _own_rows(weight: Tensor | QuantizedWeight, share: range) -> Tensor | QuantizedWeight:
    if isinstance(weight, QuantizedWeight):
        return _own_codes(weight, share)
    return _own(weight, 0, share)


def _own_columns(weight: Tensor | QuantizedWeight, share: range) -> Tensor | QuantizedWeight:
    return (
        weight.with_columns(share)
        if isinstance(weight, QuantizedWeight)
        else _own(weight, 1, share)
    )


def _own_codes(weight: QuantizedWeight, share: range) -> QuantizedWeight:
    return weight.with_rows(lambda rows: _own(rows, 0, share))
