"""The door for model families: what a model is to the rest of the engine.

A family turns a config.json into a `ModelSpec`, which is all that is known before weights are
read; the spec builds a `Model`, which computes. Whatever else a family has, only its own file in
this folder knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from torch import Tensor

from lora_serve.config.parallel import Reduce
from lora_serve.distributed.group import ALONE, Group
from lora_serve.distributed.shares import Division, Evenly, RankPlace, Replicated
from lora_serve.layers.batch import ForwardBatch
from lora_serve.layers.rotary import HeadOrder
from lora_serve.layers.vocabulary import HeadChanges
from lora_serve.model_info import Vocabulary
from lora_serve.ops.contract import Ops, ScreenedArgmax
from lora_serve.ops.quantization import QuantizedWeight


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps of each token: a key and a value for each of its KV heads.

    window: the query at position p sees (p - window, p]; None: all of [0, p].
    """

    num_kv_heads: int
    head_size: int
    window: int | None

    def of_rank(self, place: RankPlace) -> KVSpec:
        """What one rank keeps of it: its share of the heads."""
        return replace(self, num_kv_heads=len(Replicated(self.num_kv_heads).share(place)))


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """One linear layer: projections of one input, their outputs side by side.

    index: its number among all linear layers of the model, which finds an adapter's deltas.
    projections: (name, out_features) in that order; adapters change projections by these names,
        such as "model.layers.0.self_attn.q_proj".
    head_order: of the outputs, which are computed in another order than the checkpoint's; None: in
        the checkpoint's.
    parts: what ranks divide each by itself, where that is not the projections' outputs evenly.
    inputs: how ranks divide what it takes; None: all have whole rows of it.
    num_segments: so many parts of the inputs are multiplied by themselves, and then added up.
    segment: the inputs of one such part; None: all of `in_features`.
    expert: the number of the expert whose layer it is; index then counts the layers that one expert
        has in all of the model. None: of no expert that rows choose.
    """

    index: int
    projections: tuple[tuple[str, int], ...]
    in_features: int
    has_bias: bool
    head_order: HeadOrder | None = None
    parts: tuple[Division, ...] = ()
    inputs: Division | None = None
    num_segments: int = 1
    segment: range | None = None
    expert: int | None = None

    @property
    def is_sum(self) -> bool:
        """Whether it is computed as the sum of its segments."""
        return self.num_segments > 1

    def segments(self) -> tuple[LinearLayout, ...]:
        """The layers of which this is the sum, with as many indices from this one's on."""
        if not self.is_sum:
            return (self,)
        places = RankPlace(0, self.num_segments).all()
        return tuple(
            replace(
                self,
                index=self.index + place.rank,
                has_bias=self.has_bias and place.rank == 0,
                num_segments=1,
                segment=place.share(self.in_features),
            )
            for place in places
        )

    @property
    def columns(self) -> range:
        """The inputs that it takes."""
        return range(self.in_features) if self.segment is None else self.segment

    def is_own(self, place: RankPlace) -> bool:
        """Whether a rank has all inputs of this segment."""
        assert self.inputs is not None, "all ranks have whole rows"
        own, segment = self.inputs.share(place), self.segment
        return segment is not None and own.start <= segment.start and segment.stop <= own.stop

    def own_rows(self, place: RankPlace) -> tuple[tuple[range, ...], ...]:
        """Which outputs of each projection are a rank's own: its share of each part."""
        if place.world_size == 1 or self.segment is not None:
            return tuple((range(size),) for _, size in self.projections)
        rows: list[tuple[range, ...]] = []
        parts = iter(self.parts or [Evenly(size) for _, size in self.projections])
        for _, size in self.projections:
            shares, end = [], 0
            while end < size:
                part = next(parts)
                own = part.share(place)
                shares.append(range(end + own.start, end + own.stop))
                end += part.size
            rows.append(tuple(shares))
        return tuple(rows)

    def of_rank(self, place: RankPlace) -> LinearLayout:
        """What one rank computes of it."""
        if place.world_size == 1:
            return self
        if self.segment is not None:
            return self if self.is_own(place) else replace(self, projections=())
        return replace(
            self,
            projections=tuple(
                (name, sum(map(len, rows)))
                for (name, _), rows in zip(self.projections, self.own_rows(place), strict=True)
            ),
            parts=(),
            head_order=self._own_order(place),
        )

    def _own_order(self, place: RankPlace) -> HeadOrder | None:
        order = self.head_order
        if order is None:
            return None
        num_channels = len(order.channels)
        begin = num_own = 0
        for part in self.parts:
            if begin < order.num_heads * num_channels:
                num_own += len(part.share(place))
            begin += part.size
        return replace(order, num_heads=num_own // num_channels)


class Weights(Protocol):
    """The tensors of one model, by the names of `ModelSpec.tensor_shapes`."""

    def take(self, name: str) -> Tensor:
        """The tensor, in the model's dtype on its device. Each is taken once."""

    def take_table(self, name: str) -> Tensor:
        """What `take` gives, of a matrix whose rows are looked up; not to be written to."""

    def take_matrix(self, name: str, *, may_be_codes: bool = True) -> Tensor | QuantizedWeight:
        """A linear layer's weight: the codes that the checkpoint stores, or what `take` gives.

        It may be taken again, not as codes, where those of what it is computed with cannot be used.
        It is there to be packed: of weights that are packed already its numbers are not given.
        """

    def take_codes(self, name: str) -> QuantizedWeight | None:
        """The codes alone, of a matrix that may be taken as numbers, too."""


class Model(Protocol):
    """A model on its device."""

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        """The final hidden states (N, H) of the rows that are asked for.

        kv_caches: one a layer; the KV of all the batch's rows is written there. Of one batch's
        kind and size it always runs the same kernels, so that a step can be recorded.
        """

    def logits(self, hidden: Tensor, changes: HeadChanges = ()) -> Tensor:
        """(N, H) -> (N, V), in the model's dtype.

        changes: of the LM head, for rows whose adapters have any. Only of models with a vocabulary.
        """

    @property
    def screened_argmax(self) -> ScreenedArgmax | None:
        """Finds the largest logits without computing all, where the LM head was packed for it."""


class ModelSpec(Protocol):
    """A model as its config.json describes it.

    max_positions: with what the rotary scaling adds to what was trained. dtype: as the config
    names it, None if it does not.
    """

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def dtype(self) -> str | None: ...

    def facts(self) -> str:
        """All that the forward pass depends on besides weights, rotary tables and kernels.

        It is part of the model fingerprint, so it stays the same text for the same model from one
        release to the next: otherwise stored KV is lost.
        """

    def linears(self) -> Sequence[LinearLayout]:
        """The linear layers that adapters may change, in the order of their index."""

    def expert_linears(self) -> Sequence[LinearLayout]:
        """The linear layers of experts that rows choose, expert after expert."""

    def vocabulary(self) -> Vocabulary | None:
        """The matrices of which adapters may change rows; None if they may not.

        Its dtype and digests are not known yet.
        """

    def kv_specs(self) -> Sequence[KVSpec]:
        """What each layer keeps in its KV cache."""

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that `build` takes, about in that order."""

    def tensor_name(self, stored: str) -> str | None:
        """The name in `tensor_shapes` of what a checkpoint stores as `stored`; None: not read."""

    def tied_to(self, stored: str) -> str | None:
        """The name in `tensor_shapes` of what `stored` must equal, as the config ties them.

        None for what is tied to nothing. What is tied is not read.
        """

    def rotary_tables(self, context_len: int) -> Sequence[Tensor]:
        """The tables that `build` takes, computed on the CPU: (max_positions, D), float32.

        context_len: the longest context that is served, which some scalings heed.
        """

    def divided(self, num_ranks: int, reduce: Reduce) -> Self:
        """The model whose layers of divided inputs are computed as `reduce` says.

        Raises:
            ConfigError: it cannot be divided among so many ranks so.
        """

    def build(
        self, weights: Weights, ops: Ops, rotary_tables: Sequence[Tensor], group: Group = ALONE
    ) -> Model:
        """Read the model layer by layer, so that unpacked weights of one layer at most are alive.

        Args:
            weights: gives the tensors that `tensor_shapes` names.
            ops: packs the linear layers.
            rotary_tables: from `rotary_tables`, on the model's device.
            group: the ranks that the model is divided among; this one's share is built.
        """


def num_parameters(spec: ModelSpec) -> int:
    """How many values its tensors have; one that is used twice counts once."""
    return sum(math.prod(shape) for shape in spec.tensor_shapes().values())


def vocabulary_linears(vocabulary: Vocabulary | None) -> tuple[LinearLayout, ...]:
    """The vocabulary's matrices as the linear layers that their low-rank deltas are of.

    Divided as DecoderParts divides them: embeddings by columns, the LM head by tokens.
    """
    if vocabulary is None:
        return ()
    return tuple(
        LinearLayout(index, ((name, out_features),), in_features, has_bias=False)
        for index, (name, (out_features, in_features)) in enumerate(vocabulary.lora_modules.items())
    )


def adapted_modules(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The `lora_modules` of a model, with its experts'."""
    return lora_modules([*spec.linears(), *spec.expert_linears()])


def lora_modules(linears: Sequence[LinearLayout]) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of each projection that an adapter may change."""
    return {
        name: (out_features, linear.in_features)
        for linear in linears
        for name, out_features in linear.projections
    }
