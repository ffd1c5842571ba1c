"""The one dense decoder: pre-norm attention and gated MLP, by the facts of a DecoderSpec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.layers.attention import Attention, HeadLayout
from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.embedding import Embedding, LMHead
from lora_serve.layers.linear import Linear
from lora_serve.layers.norm import RMSNorm
from lora_serve.models.layout import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    LayerLayout,
    LinearLayout,
    layer_layout,
)
from lora_serve.models.spec import DecoderSpec
from lora_serve.models.weights import WeightReader
from lora_serve.ops import Ops, ScreenedArgmax


class MLP:
    """down(silu(gate x) * up x)."""

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor, rows: ForwardBatch | OutputRows) -> Tensor:
        return self._down(self._ops.silu_and_mul(self._gate_up(x, rows)), rows)


class DecoderLayer:
    def __init__(
        self, attention: Attention, mlp: MLP, input_norm: RMSNorm, post_attention_norm: RMSNorm
    ) -> None:
        self._attention = attention
        self._mlp = mlp
        self._post_attention_norm = post_attention_norm
        self.input_norm = input_norm

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        kv_cache: Tensor,
        outputs: OutputRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What is to be added next, and the residual to add it to.

        x: what input_norm gave. outputs: go on with these rows alone, once KV is written.
        """
        q = self._attention.queries(x, batch, kv_cache)
        rows: ForwardBatch | OutputRows = batch
        if outputs is not None:
            rows = outputs
            q, residual = (each.index_select(0, outputs.rows) for each in (q, residual))
        attended = self._attention.attend(q, rows, kv_cache)
        return self._mlp(self._post_attention_norm.add(attended, residual), rows), residual


class Decoder:
    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        lm_head: LMHead,
    ) -> None:
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        """The normed hidden states (N, H) of the rows that are asked for.

        Writes the KV of all rows, one cache a layer.
        """
        residual = self._embedding(batch)
        x = None  # what is to be added to it
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            outputs = batch.outputs if layer is self._layers[-1] else None
            norm = layer.input_norm
            normed = norm(residual) if x is None else norm.add(x, residual)
            x, residual = layer(normed, residual, batch, kv_cache, outputs)
        assert x is not None, "a model has layers"
        return self._final_norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N, V), in the model's dtype."""
        return self._lm_head(hidden)

    @property
    def screened_argmax(self) -> ScreenedArgmax | None:
        """Finds the largest logits without computing all, where the LM head was packed for it."""
        return self._lm_head.screened_argmax


def build_decoder(spec: DecoderSpec, weights: WeightReader, ops: Ops, cos_sin: Tensor) -> Decoder:
    """Read a model layer by layer, so that unpacked weights of one layer at most are alive.

    Args:
        spec: the model's facts.
        weights: gives the tensors that `tensor_shapes(spec)` names.
        ops: packs the linear layers.
        cos_sin: (P, head_size) from `rotary_table`, for as many positions as will be asked for.
    """
    embedding = weights.take(EMBEDDING)
    layers = [
        _build_layer(spec, layer_layout(spec, layer), weights, ops, cos_sin)
        for layer in range(spec.num_layers)
    ]
    lm_head = embedding if spec.tie_word_embeddings else weights.take(LM_HEAD)
    return Decoder(
        Embedding(ops, embedding),
        layers,
        RMSNorm(ops, weights.take(FINAL_NORM), spec.rms_norm_eps),
        LMHead(ops, lm_head),
    )


def _build_layer(
    spec: DecoderSpec, layout: LayerLayout, weights: WeightReader, ops: Ops, cos_sin: Tensor
) -> DecoderLayer:
    def norm(name: str) -> RMSNorm:
        return RMSNorm(ops, weights.take(name), spec.rms_norm_eps)

    attention = Attention(
        ops,
        HeadLayout(spec.num_heads, spec.num_kv_heads, spec.head_size),
        qkv=_build_linear(layout.qkv, weights, ops),
        output=_build_linear(layout.output, weights, ops),
        q_norm=norm(layout.q_norm) if spec.qk_norm else None,
        k_norm=norm(layout.k_norm) if spec.qk_norm else None,
        cos_sin=cos_sin,
        sliding_window=spec.sliding_window,
    )
    gate_up = _build_linear(layout.gate_up, weights, ops)
    mlp = MLP(ops, gate_up, _build_linear(layout.down, weights, ops))
    return DecoderLayer(attention, mlp, norm(layout.input_norm), norm(layout.post_attention_norm))


def _build_linear(layout: LinearLayout, weights: WeightReader, ops: Ops) -> Linear:
    def fused(kind: str) -> Tensor:
        parts = [weights.take(f"{name}.{kind}") for name, _ in layout.projections]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    bias = fused("bias") if layout.has_bias else None
    return Linear(ops, fused("weight"), bias, layout.index)
