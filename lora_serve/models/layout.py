"""Which tensors a decoder's checkpoint holds, and how its projections are fused into linear layers.

All supported families name their tensors alike, so names follow from the spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_serve.models.spec import DecoderSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """One linear layer: projections of one input, their outputs side by side.

    index: its number among all linear layers of the model.
    projections: (name, out_features) as in the checkpoint: "model.layers.0.self_attn.q_proj".
    """

    index: int
    projections: tuple[tuple[str, int], ...]
    in_features: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One decoder layer. q_norm and k_norm are empty where the spec has no qk_norm."""

    qkv: LinearLayout
    output: LinearLayout
    gate_up: LinearLayout
    down: LinearLayout
    input_norm: str
    post_attention_norm: str
    q_norm: str
    k_norm: str

    @property
    def linears(self) -> tuple[LinearLayout, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)


def layer_layout(spec: DecoderSpec, layer: int) -> LayerLayout:
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    qkv = tuple((f"{attention}.{p}_proj", q_size if p == "q" else kv_size) for p in "qkv")
    output = ((f"{attention}.o_proj", spec.hidden_size),)
    gate_up = tuple((f"{mlp}.{p}_proj", spec.intermediate_size) for p in ("gate", "up"))
    down = ((f"{mlp}.down_proj", spec.hidden_size),)
    return LayerLayout(
        qkv=LinearLayout(4 * layer, qkv, spec.hidden_size, spec.qkv_bias),
        output=LinearLayout(4 * layer + 1, output, q_size, spec.output_bias),
        gate_up=LinearLayout(4 * layer + 2, gate_up, spec.hidden_size, False),
        down=LinearLayout(4 * layer + 3, down, spec.intermediate_size, False),
        input_norm=f"{prefix}.input_layernorm.weight",
        post_attention_norm=f"{prefix}.post_attention_layernorm.weight",
        q_norm=f"{attention}.q_norm.weight" if spec.qk_norm else "",
        k_norm=f"{attention}.k_norm.weight" if spec.qk_norm else "",
    )


def all_linears(spec: DecoderSpec) -> Iterator[LinearLayout]:
    """In the order of their index."""
    for layer in range(spec.num_layers):
        yield from layer_layout(spec, layer).linears


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder reads. A tied LM head is not among them."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        layout = layer_layout(spec, layer)
        for linear in layout.linears:
            for name, out_features in linear.projections:
                shapes[f"{name}.weight"] = (out_features, linear.in_features)
                if linear.has_bias:
                    shapes[f"{name}.bias"] = (out_features,)
        shapes[layout.input_norm] = shapes[layout.post_attention_norm] = (spec.hidden_size,)
        if spec.qk_norm:
            shapes[layout.q_norm] = shapes[layout.k_norm] = (spec.head_size,)
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def lora_modules(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of each projection an adapter may change."""
    return {
        name: (out_features, linear.in_features)
        for linear in all_linears(spec)
        for name, out_features in linear.projections
    }
