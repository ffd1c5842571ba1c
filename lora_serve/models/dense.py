"""The dense decoder: pre-norm attention and gated MLP, for the families whose data flow that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lora_serve.layers.attention import Attention
from lora_serve.layers.batch import ForwardBatch, OutputRows
from lora_serve.layers.embedding import Embedding, LMHead
from lora_serve.layers.mlp import GatedMLP
from lora_serve.layers.norm import RMSNorm
from lora_serve.layers.rotary import RopeSpec, rotary_table
from lora_serve.models.base import Weights
from lora_serve.models.decoder import Decoder
from lora_serve.models.decoder_shape import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    DecoderShape,
    build_linear,
)
from lora_serve.models.facts import facts_text
from lora_serve.ops.contract import Ops

# As they stand in the fingerprints of KV that is stored already. A fact that is added is none of
# them: it is a field with a default.
_FACTS = (
    *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("num_kv_heads", "head_size", "rms_norm_eps", "rope", "max_positions", "qkv_bias"),
    *("output_bias", "qk_norm", "tie_word_embeddings", "sliding_window", "dtype"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec(DecoderShape):
    """The facts in which dense families differ.

    qk_norm: RMS norm of each head's q and k before rotation.
    """

    rms_norm_eps: float
    rope: RopeSpec
    qk_norm: bool

    @property
    def sliding_window(self) -> int | tuple[int | None, ...] | None:
        """The window of all layers, or the windows of each where they differ."""
        return self.windows[0] if len(set(self.windows)) == 1 else self.windows

    def facts(self) -> str:
        return facts_text(self, "DecoderSpec", _FACTS)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shapes_with_norms(self._norms)

    def _norms(self, layer: int) -> dict[str, int]:
        names = _NormNames.of(self.named_layer(layer))
        norms = dict.fromkeys((names.input, names.post_attention), self.hidden_size)
        return norms | (dict.fromkeys((names.q, names.k), self.head_size) if self.qk_norm else {})

    def rotary_tables(self) -> tuple[Tensor, ...]:
        return (rotary_table(self.rope, self.head_size, self.max_positions),)

    def build(self, weights: Weights, ops: Ops, rotary_tables: Sequence[Tensor]) -> Decoder:
        embedding = weights.take(self.named(EMBEDDING))
        (cos_sin,) = rotary_tables
        layers = [
            _build_layer(self, layer, weights, ops, cos_sin) for layer in range(self.num_layers)
        ]
        lm_head = embedding if self.tie_word_embeddings else weights.take(LM_HEAD)
        return Decoder(
            Embedding(ops, embedding),
            layers,
            RMSNorm(ops, weights.take(self.named(FINAL_NORM)), self.rms_norm_eps),
            LMHead(ops, lm_head),
        )


@dataclass(frozen=True, slots=True)
class _NormNames:
    """The norms of one layer; q and k are there if the spec has qk_norm."""

    input: str
    post_attention: str
    q: str
    k: str

    @classmethod
    def of(cls, prefix: str) -> _NormNames:
        return cls(
            input=f"{prefix}.input_layernorm.weight",
            post_attention=f"{prefix}.post_attention_layernorm.weight",
            q=f"{prefix}.self_attn.q_norm.weight",
            k=f"{prefix}.self_attn.k_norm.weight",
        )


class DenseLayer:
    def __init__(
        self, attention: Attention, mlp: GatedMLP, input_norm: RMSNorm, post_attention_norm: RMSNorm
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
        """Do what `DecoderLayer` says."""
        attended, residual, rows = self._attention(x, residual, batch, kv_cache, outputs)
        return self._mlp(self._post_attention_norm.add(attended, residual), rows), residual


def _build_layer(
    spec: DenseSpec, layer: int, weights: Weights, ops: Ops, cos_sin: Tensor
) -> DenseLayer:
    def norm(name: str) -> RMSNorm:
        return RMSNorm(ops, weights.take(name), spec.rms_norm_eps)

    linears, norms = spec.layer_linears(layer), _NormNames.of(spec.named_layer(layer))
    attention = Attention(
        ops,
        spec.heads,
        layer=layer,
        qkv=build_linear(linears.qkv, weights, ops),
        output=build_linear(linears.output, weights, ops),
        q_norm=norm(norms.q) if spec.qk_norm else None,
        k_norm=norm(norms.k) if spec.qk_norm else None,
        cos_sin=cos_sin,
        scale=spec.head_size**-0.5,
        sliding_window=spec.windows[layer],
    )
    gate_up = build_linear(linears.gate_up, weights, ops)
    mlp = GatedMLP(gate_up, ops.rowwise.silu_and_mul, build_linear(linears.down, weights, ops))
    return DenseLayer(attention, mlp, norm(norms.input), norm(norms.post_attention))
