"""What all decoder families have in common: sizes, and from them tensors, linear layers and KV.

The families name their tensors alike, as transformers does; norms are the family's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

from lora_serve.config.parallel import Reduce, above_limit
from lora_serve.distributed.shares import Evenly, HeadChannels, Heads, RankPlace
from lora_serve.errors import ConfigError
from lora_serve.layers.rotary import HeadOrder
from lora_serve.model_info import Vocabulary
from lora_serve.models.base import KVSpec, LinearLayout
from lora_serve.models.mixture import Mixture

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
LM_HEAD = "lm_head.weight"
# How names begin where the decoder was saved alone, as for Qwen3-Embedding: without its prefix.
_SAVED_ALONE = ("embed_tokens.", "layers.", "norm.")


@dataclass(frozen=True, slots=True)
class MLPLinears:
    """The linear layers of an MLP, in the order of their index."""

    into: LinearLayout
    out: LinearLayout


@dataclass(frozen=True, slots=True)
class LayerLinears:
    """The linear layers of one decoder layer, in the order of their index.

    mlp: where there is a mixture of experts, those of the expert that all rows take, if any.
    """

    qkv: LinearLayout
    output: LinearLayout
    mlp: MLPLinears | None

    def whole(self) -> tuple[LinearLayout, ...]:
        mlp = () if self.mlp is None else (self.mlp.into, self.mlp.out)
        return (self.qkv, self.output, *mlp)

    def all(self) -> tuple[LinearLayout, ...]:
        return tuple(each for linear in self.whole() for each in linear.segments())


@dataclass(frozen=True, slots=True)
class ProjectionNames:
    """What the linear layers are called within a decoder layer.

    qkv, mlp_in: those whose outputs lie side by side in one linear layer. A checkpoint may have
    them as one tensor already, which then is one projection, to adapters too.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder of self-attention and MLPs.

    qkv_bias, output_bias, mlp_bias: whether q k v, o, and the MLP's layers have a bias. windows: of
    each layer, as KVSpec has them. max_positions, dtype: as ModelSpec has them. is_gated: whether
    the MLP has a gate. mixture: of experts, in the place of some layers' MLPs. num_segments: as
    LinearLayout has them, of o and of the MLP's second layer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    tie_word_embeddings: bool
    max_positions: int
    dtype: str | None
    projections: ProjectionNames = ProjectionNames()
    mlp_bias: bool = False
    is_gated: bool = True
    mixture: Mixture | None = None
    num_segments: int = 1

    @property
    def head_order(self) -> HeadOrder | None:
        """The order in which q and k are computed, as LinearLayout has it."""
        return None

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads)

    @property
    def prefix(self) -> str:
        """The decoder's name in its checkpoint, where its tensors' names begin."""
        return "model"

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def named(self, tensor: str) -> str:
        return f"{self.prefix}.{tensor}"

    def named_layer(self, layer: int) -> str:
        return f"{self.prefix}.layers.{layer}"

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(
            embedding=self.named(EMBEDDING).removesuffix(".weight"),
            head=LM_HEAD.removesuffix(".weight"),
            size=self.vocab_size,
            hidden_size=self.hidden_size,
            is_tied=self.tie_word_embeddings,
        )

    def kv_specs(self) -> tuple[KVSpec, ...]:
        return tuple(KVSpec(self.num_kv_heads, self.head_size, window) for window in self.windows)

    def divided(self, num_ranks: int, reduce: Reduce) -> Self:
        """Do what `ModelSpec` says: each rank has one of everything that is divided."""
        self._check_counts(num_ranks)
        if not reduce.adds_segments:
            return self
        least = min(each.in_features for each in self.linears() if each.inputs is not None)
        if reduce.num_segments > least:
            raise ConfigError(
                f"{reduce} makes {reduce.num_segments} segments of {least} inputs; choose gather"
            )
        spec = replace(self, num_segments=reduce.num_segments)
        spec._check_segments(RankPlace(0, num_ranks), reduce)
        return spec

    def _check_counts(self, num_ranks: int) -> None:
        counts = {
            "attention heads": self.num_heads,
            "tokens": self.vocab_size,
            "hidden channels": self.hidden_size,
        }
        sizes = list(filter(None, map(self._mlp_size, range(self.num_layers))))
        if sizes:
            counts["intermediate channels"] = min(sizes)
        if self.mixture is not None:
            counts["channels of an expert"] = self.mixture.intermediate_size
        what = min(counts, key=lambda each: counts[each])
        if num_ranks > counts[what]:
            raise above_limit(num_ranks, f"the model's {counts[what]} {what}")

    def _check_segments(self, place: RankPlace, reduce: Reduce) -> None:
        """Each rank has as many segments, whole: else ranks would add in another order."""
        each = self.num_segments / place.world_size
        for linear in chain(*(self.layer_linears(i).whole() for i in range(self.num_layers))):
            own = [segment for segment in linear.segments() if segment.segment is not None]
            counts = {sum(segment.is_own(other) for segment in own) for other in place.all()}
            if own and counts != {each}:
                ((name, _),) = linear.projections
                raise ConfigError(
                    f"{reduce}: {place.world_size} ranks would cut some of the "
                    f"{self.num_segments} segments of {name}; choose gather, or another "
                    "--tensor-parallel-size"
                )

    def linears(self) -> tuple[LinearLayout, ...]:
        layers = map(self.layer_linears, range(self.num_layers))
        return tuple(linear for each in layers for linear in each.all())

    def expert_linears(self) -> tuple[LinearLayout, ...]:
        mixture = self.mixture
        if mixture is None:
            return ()
        return tuple(
            linear
            for layer in mixture.layers
            for linear in mixture.linears(
                self.named_layer(layer), self.hidden_size, mixture.lora_index(layer)
            )
        )

    def layer_linears(self, layer: int) -> LayerLinears:
        q = HeadChannels(self.heads, self.head_size)
        kv = HeadChannels(self.heads, self.head_size, are_kv=True)
        names, hidden = self.projections, self.hidden_size
        qkv = self._named_sizes(layer, names.qkv, (q.size, kv.size, kv.size))
        output = self._named_sizes(layer, (names.output,), (hidden,))
        pair = 1 + self.num_segments  # of layers, the second of which is in segments
        index = sum(pair if self._mlp_size(each) is None else 2 * pair for each in range(layer))
        return LayerLinears(
            qkv=LinearLayout(index, qkv, hidden, self.qkv_bias, self.head_order, (q, kv, kv)),
            output=LinearLayout(
                index + 1,
                output,
                q.size,
                self.output_bias,
                inputs=q,
                num_segments=self.num_segments,
            ),
            mlp=self._mlp_linears(layer, index + pair),
        )

    def mixture_of(self, layer: int) -> Mixture | None:
        """The facts of the layer's mixture of experts; None where it has none."""
        return self.mixture if self.mixture and layer in self.mixture.layers else None

    def _mlp_size(self, layer: int) -> int | None:
        """The intermediate size of what LayerLinears.mlp has; None where it has nothing."""
        mixture = self.mixture_of(layer)
        return self.intermediate_size if mixture is None else mixture.shared_size

    def _mlp_linears(self, layer: int, index: int) -> MLPLinears | None:
        size, mixture = self._mlp_size(layer), self.mixture_of(layer)
        if size is None:
            return None
        into, out = self.projections.mlp_in, self.projections.mlp_out
        if mixture is not None:
            shared = mixture.names.shared
            into = tuple(f"{shared}.{name.rpartition('.')[2]}" for name in into)
            out = f"{shared}.{out.rpartition('.')[2]}"
        sizes = (size,) * (2 if self.is_gated else 1)
        inner = self._named_sizes(layer, into, sizes)
        outer = self._named_sizes(layer, (out,), (self.hidden_size,))
        parts = tuple(map(Evenly, sizes))
        return MLPLinears(
            into=LinearLayout(index, inner, self.hidden_size, self.mlp_bias, None, parts),
            out=LinearLayout(
                index + 1,
                outer,
                size,
                self.mlp_bias,
                inputs=Evenly(size),
                num_segments=self.num_segments,
            ),
        )

    def _named_sizes(
        self, layer: int, names: Sequence[str], sizes: Sequence[int]
    ) -> tuple[tuple[str, int], ...]:
        """Projections of a layer; one name for several sizes is that of all together."""
        if len(names) == 1:
            sizes = (sum(sizes),)
        prefix = self.named_layer(layer)
        return tuple((f"{prefix}.{name}", size) for name, size in zip(names, sizes, strict=True))

    def shapes_with_norms(
        self, norms: Callable[[int], Mapping[str, int]]
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors. A tied LM head is not among them.

        norms: the names and sizes of a layer's norms.
        """
        shapes: dict[str, tuple[int, ...]] = {
            self.named(EMBEDDING): (self.vocab_size, self.hidden_size)
        }
        for layer in range(self.num_layers):
            for linear in self.layer_linears(layer).whole():
                for name, out_features in linear.projections:
                    shapes[f"{name}.weight"] = (out_features, linear.in_features)
                    if linear.has_bias:
                        shapes[f"{name}.bias"] = (out_features,)
            if (mixture := self.mixture_of(layer)) is not None:
                shapes |= mixture.shapes(self.named_layer(layer), self.hidden_size)
            shapes |= {name: (size,) for name, size in norms(layer).items()}
        shapes[self.named(FINAL_NORM)] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes[LM_HEAD] = (self.vocab_size, self.hidden_size)
        return shapes

    def tensor_name(self, stored: str) -> str | None:
        """Its name in `tensor_shapes`; None for a tied LM head, which some checkpoints store."""
        if stored.startswith(_SAVED_ALONE):
            return self.named(stored)
        return None if self.tied_to(stored) else stored

    def tied_to(self, stored: str) -> str | None:
        """Do what `ModelSpec` says: a tied LM head is the embeddings."""
        is_tied_head = self.tie_word_embeddings and stored == LM_HEAD
        return self.named(EMBEDDING) if is_tied_head else None
