"""The decoder of attention and an MLP in each layer, for the families whose data flow that is.

Families differ in where norms stand, in what is scaled, and in which channels of heads turn. Some
have a mixture of experts in the place of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.distributed.group import ALONE, Group
from lora_serve.distributed.shares import HeadChannels, place_of
from lora_serve.layers.attention import Attention
from lora_serve.layers.host_made import Clip
from lora_serve.layers.limited_swiglu import LimitedSwiGLU
from lora_serve.layers.mlp import GatedMLP, PlainMLP, gated_activation
from lora_serve.layers.norm import (
    LayerNorm,
    LayerNormOfEachHead,
    NoNorm,
    Norm,
    RMSNorm,
    RMSNormOfAllHeads,
)
from lora_serve.layers.rotary import HeadOrder, RopeSpec, paired_channels, rotary_table
from lora_serve.models.base import Weights
from lora_serve.models.decoder import Decoder, DecoderLayer
from lora_serve.models.decoder_layers import MLP, LayerNorms, ParallelLayer, SequentialLayer
from lora_serve.models.decoder_parts import DecoderParts
from lora_serve.models.decoder_shape import FINAL_NORM, DecoderShape
from lora_serve.models.facts import facts_text
from lora_serve.ops.contract import Ops

# As they stand in the fingerprints of KV that is stored already. A fact that is added is none of
# them: it is a field with a default.
_FACTS = (
    *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("num_kv_heads", "head_size", "rms_norm_eps", "rope", "max_positions", "qkv_bias"),
    *("output_bias", "qk_norm", "tie_word_embeddings", "sliding_window", "dtype"),
)
_FINAL_BIAS = "norm.bias"
_SINKS = "self_attn.sinks"


@dataclass(frozen=True, slots=True)
class NormNames:
    """What the norms around a layer's two parts are called in it; None: there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    def present(self) -> tuple[str, ...]:
        each = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in each if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec(DecoderShape):
    """The facts in which dense families differ.

    rms_norm_eps: of all norms. qk_norm: RMS norm of each head's q and k before rotation.
    qk_norm_of_all_heads: one over all heads of q, and one over those of k, instead.
    qk_layer_norm: a layer norm of each, with weights of each head's own, instead.
    clip_qkv: bounds what q, k and v are rotated and kept with; None for none.
    layer_norm, norm_bias: whether norms are layer norms, and have a bias.
    is_parallel: whether both parts of a layer read its one norm.
    rope, windowed_rope: of layers without and with a window; None: those with one have the same.
    unrotated: layers whose q and k are not rotated.
    rotary_size: so many channels of a head turn, the first; None: all. is_interleaved: whether
        neighbouring channels turn together, or those of two halves.
    embedding_scale, residual_scale, logit_scale: of the embedding's rows, of what a layer's parts
        add, and of logits; None for none. attention_scale: of the products q k; None: one over the
        root of head_size.
    activation: silu or gelu_tanh. has_sinks: whether heads of attention have, as
    AttentionKernels has it.
    """

    rms_norm_eps: float
    rope: RopeSpec
    qk_norm: bool
    qk_norm_of_all_heads: bool = False
    norms: NormNames = NormNames()
    layer_norm: bool = False
    norm_bias: bool = False
    is_parallel: bool = False
    windowed_rope: RopeSpec | None = None
    unrotated: tuple[int, ...] = ()
    rotary_size: int | None = None
    is_interleaved: bool = False
    embedding_scale: float | None = None
    attention_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    activation: str = "silu"
    has_sinks: bool = False
    qk_layer_norm: bool = False
    clip_qkv: float | None = None

    def __post_init__(self) -> None:
        """Refuse facts that no layer heeds together, which is a mistake of a family's reader."""
        assert self.is_gated or self.activation == "gelu_tanh", (
            f"an MLP without a gate has gelu_tanh, not {self.activation}"
        )
        assert self.layer_norm or not self.norm_bias, "RMS norms have no bias"
        of_heads = (self.qk_norm, self.qk_norm_of_all_heads, self.qk_layer_norm)
        assert sum(of_heads) <= 1, "q and k have norms of one kind"
        if self.is_parallel:
            assert self.residual_scale is None, "parallel layers scale nothing that they add"
            norms = self.norms.present()
            assert norms == (self.norms.before_attention,), (
                f"parallel layers have one norm: {norms}"
            )

    @property
    def sliding_window(self) -> int | tuple[int | None, ...] | None:
        """The window of all layers, or the windows of each where they differ."""
        return self.windows[0] if len(set(self.windows)) == 1 else self.windows

    @property
    def head_order(self) -> HeadOrder | None:
        if self.rotary_size is None and not self.is_interleaved:
            return None
        channels = paired_channels(
            self.head_size, self.rotary_size or self.head_size, interleaved=self.is_interleaved
        )
        return HeadOrder(channels, self.num_heads + self.num_kv_heads)

    def facts(self) -> str:
        return facts_text(self, "DecoderSpec", _FACTS)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self.shapes_with_norms(self._norms)
        if self.qk_layer_norm:
            counts = {"q": self.num_heads, "k": self.num_kv_heads}
            shapes |= {
                _head_norm_name(self, layer, name): (count, self.head_size)
                for layer in range(self.num_layers)
                for name, count in counts.items()
            }
        if self.norm_bias:
            shapes[self.named(_FINAL_BIAS)] = (self.hidden_size,)
        return shapes

    def _norms(self, layer: int) -> dict[str, int]:
        kinds = ("weight", "bias") if self.norm_bias else ("weight",)
        prefix = self.named_layer(layer)
        norms = {
            f"{prefix}.{name}.{kind}": self.hidden_size
            for name in self.norms.present()
            for kind in kinds
        }
        if self.qk_norm or self.qk_norm_of_all_heads:
            counts = {"q": self.num_heads, "k": self.num_kv_heads}
            for name, count in counts.items():
                heads = count if self.qk_norm_of_all_heads else 1
                norms[_head_norm_name(self, layer, name)] = heads * self.head_size
        if self.has_sinks:
            norms[f"{prefix}.{_SINKS}"] = self.num_heads
        return norms

    def rotary_tables(self, context_len: int) -> tuple[Tensor, ...]:
        return tuple(
            rotary_table(rope, self.head_size, self.max_positions, self.rotary_size, context_len)
            for rope in self._ropes()
        )

    def build(
        self, weights: Weights, ops: Ops, rotary_tables: Sequence[Tensor], group: Group = ALONE
    ) -> Decoder:
        parts = DecoderParts(self, weights, ops, group)
        tables = dict(zip(self._ropes(), rotary_tables, strict=True))
        embedding, tied = parts.embeddings()
        layers = [
            _LayerBuilder(self, layer, parts).build(tables[self._rope_of(layer)])
            for layer in range(self.num_layers)
        ]
        return Decoder(
            parts.embedding(embedding, self.embedding_scale),
            layers,
            _norm(self, self.named(FINAL_NORM).removesuffix(".weight"), weights, ops),
            parts.lm_head(tied, scale=self.logit_scale),
        )

    def _ropes(self) -> tuple[RopeSpec | None, ...]:
        """Each that some layer has, once; None where a layer is not rotated."""
        return tuple(dict.fromkeys(map(self._rope_of, range(self.num_layers))))

    def _rope_of(self, layer: int) -> RopeSpec | None:
        if layer in self.unrotated:
            return None
        return self.rope if self.windows[layer] is None else self.windowed_rope or self.rope


class _LayerBuilder:
    """Takes the weights of one layer."""

    def __init__(self, spec: DenseSpec, layer: int, parts: DecoderParts) -> None:
        self._spec = spec
        self._layer = layer
        self._parts = parts
        self._weights = parts.weights
        self._ops = parts.ops

    def build(self, cos_sin: Tensor) -> DecoderLayer:
        spec, names, ops = self._spec, self._spec.norms, self._ops
        attention = self._attention(cos_sin)
        mlp = self._mlp()
        before = self._norm(names.before_attention) or NoNorm(ops)
        if spec.is_parallel:
            return ParallelLayer(ops, attention, mlp, before)
        norms = LayerNorms(
            before_attention=before,
            after_attention=self._norm(names.after_attention),
            before_mlp=self._norm(names.before_mlp) or NoNorm(ops),
            after_mlp=self._norm(names.after_mlp),
        )
        return SequentialLayer(ops, attention, mlp, norms, spec.residual_scale)

    def _attention(self, cos_sin: Tensor) -> Attention:
        spec, linears = self._spec, self._spec.layer_linears(self._layer)
        scale = spec.attention_scale
        return Attention(
            self._ops,
            self._parts.heads,
            layer=self._layer,
            qkv=self._parts.linear(linears.qkv),
            output=self._parts.gathered_linear(linears.output),
            q_norm=self._head_norm("q"),
            k_norm=self._head_norm("k"),
            cos_sin=cos_sin,
            scale=spec.head_size**-0.5 if scale is None else scale,
            sliding_window=spec.windows[self._layer],
            sinks=self._sinks(),
            clip=None if spec.clip_qkv is None else Clip(self._ops, spec.clip_qkv),
        )

    def _sinks(self) -> Tensor | None:
        """The sinks of this rank's heads."""
        if not self._spec.has_sinks:
            return None
        whole = self._weights.take(f"{self._spec.named_layer(self._layer)}.{_SINKS}")
        own = self._spec.heads.queries(place_of(self._parts.group))
        return whole[own.start : own.stop].to(torch.float32).contiguous()

    def _mlp(self) -> MLP:
        spec = self._spec
        linears = spec.layer_linears(self._layer).mlp
        gated = None
        if linears is not None:
            into = self._parts.linear(linears.into)
            out = self._parts.gathered_linear(linears.out)
            if not spec.is_gated:
                return PlainMLP(into, self._ops.rowwise.gelu_tanh, out)
            gated = GatedMLP(self._ops, into, spec.activation, out)
        mixture = spec.mixture_of(self._layer)
        if mixture is not None:
            act_and_mul = gated_activation(self._ops, spec.activation)
            if mixture.swiglu is not None:
                act_and_mul = LimitedSwiGLU(self._ops, mixture.swiglu)
            return self._parts.experts(mixture, self._layer, act_and_mul, gated)
        assert gated is not None, "a layer has an MLP or experts"
        return gated

    def _norm(self, name: str | None) -> Norm | None:
        if name is None:
            return None
        named = f"{self._spec.named_layer(self._layer)}.{name}"
        return _norm(self._spec, named, self._weights, self._ops)

    def _head_norm(self, projection: str) -> Callable[[Tensor], Tensor] | None:
        spec = self._spec
        if not (spec.qk_norm or spec.qk_norm_of_all_heads or spec.qk_layer_norm):
            return None
        weight = self._weights.take(_head_norm_name(spec, self._layer, projection))
        if spec.qk_layer_norm:
            return LayerNormOfEachHead(
                self._ops, self._own_heads(weight, projection), spec.rms_norm_eps
            )
        if spec.qk_norm_of_all_heads:
            channels = HeadChannels(spec.heads, spec.head_size, are_kv=projection == "k")
            gather = self._parts.gather(channels)
            return RMSNormOfAllHeads(self._ops, weight, spec.rms_norm_eps, gather)
        return RMSNorm(self._ops, weight, spec.rms_norm_eps)

    def _own_heads(self, weight: Tensor, projection: str) -> Tensor:
        """This rank's rows of (heads, D), their channels in the order that q and k come in."""
        spec, place = self._spec, place_of(self._parts.group)
        own = spec.heads.kv(place) if projection == "k" else spec.heads.queries(place)
        rows, order = weight[own.start : own.stop], spec.head_order
        return rows.contiguous() if order is None else rows[:, list(order.channels)]


def _head_norm_name(spec: DenseSpec, layer: int, projection: str) -> str:
    return f"{spec.named_layer(layer)}.self_attn.{projection}_norm.weight"


def _norm(spec: DenseSpec, name: str, weights: Weights, ops: Ops) -> Norm:
    weight = weights.take(f"{name}.weight")
    if not spec.layer_norm:
        return RMSNorm(ops, weight, spec.rms_norm_eps)
    bias = weights.take(f"{name}.bias") if spec.norm_bias else None
    return LayerNorm(ops, weight, bias, spec.rms_norm_eps)
