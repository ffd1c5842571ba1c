"""Gemma 2 and 3: decoders with a norm before and after each part, some of their layers windowed.

Norms multiply by 1 + weight in float32, embeddings are scaled, and Gemma 2 caps scores and logits.
Of Gemma 3's multimodal checkpoints the text model alone is read.

Source: arxiv.org/abs/2408.00118 (Gemma 2), arxiv.org/abs/2503.19786 (Gemma 3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lora_serve.distributed.group import ALONE, Group
from lora_serve.layers.attention import Attention
from lora_serve.layers.mlp import GatedMLP
from lora_serve.layers.norm import RMSNorm
from lora_serve.layers.rotary import RopeSpec, rotary_table
from lora_serve.models.base import Weights
from lora_serve.models.common_config import (
    FULL,
    SLIDING,
    attention_bias,
    check_heads,
    layer_types,
    stored_dtype,
    windows_of,
)
from lora_serve.models.decoder import Decoder
from lora_serve.models.decoder_layers import LayerNorms, SequentialLayer
from lora_serve.models.decoder_parts import DecoderParts
from lora_serve.models.decoder_shape import FINAL_NORM, DecoderShape
from lora_serve.models.facts import facts_text
from lora_serve.models.rope import (
    check_factors,
    read_max_positions,
    read_rope,
    read_ropes_by_kind,
    refuse_partial,
)
from lora_serve.models.settings import Settings
from lora_serve.ops.contract import Ops

logger = logging.getLogger(__name__)

_MULTIMODAL = "Gemma3ForConditionalGeneration"
_VISION = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)

# In the order in which LayerNorms takes them.
_LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_Q_NORM, _K_NORM = "self_attn.q_norm", "self_attn.k_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaSpec(DecoderShape):
    """The facts in which Gemmas differ.

    rope, windowed_rope: of layers without and with a window. attention_scale: of the products q k.
    attention_softcap, final_softcap: of scores and logits, None for none. qk_norm: RMS norm of each
    head's q and k before rotation.
    """

    rms_norm_eps: float
    rope: RopeSpec
    windowed_rope: RopeSpec
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    qk_norm: bool

    @property
    def prefix(self) -> str:
        return "model.language_model" if self.architecture == _MULTIMODAL else "model"

    def facts(self) -> str:
        return facts_text(self, "GemmaSpec")

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shapes_with_norms(self._norms)

    def tensor_name(self, stored: str) -> str | None:
        if self.architecture == _MULTIMODAL and stored.startswith(_VISION):
            return None
        return DecoderShape.tensor_name(self, self._newer_name(stored))

    def tied_to(self, stored: str) -> str | None:
        return DecoderShape.tied_to(self, self._newer_name(stored))

    def _newer_name(self, stored: str) -> str:
        if self.architecture != _MULTIMODAL:
            return stored
        name = stored.replace("language_model.model.", "model.language_model.", 1)
        return name.replace("language_model.lm_head.", "lm_head.", 1)

    def rotary_tables(self, context_len: int) -> tuple[Tensor, ...]:
        return tuple(
            rotary_table(rope, self.head_size, self.max_positions, context_len=context_len)
            for rope in self._ropes()
        )

    def build(
        self, weights: Weights, ops: Ops, rotary_tables: Sequence[Tensor], group: Group = ALONE
    ) -> Decoder:
        parts = DecoderParts(self, weights, ops, group)
        tables = dict(zip(self._ropes(), rotary_tables, strict=True))
        embedding, tied = parts.embeddings()
        layers = [
            _build_layer(self, layer, parts, tables[self._rope_of(layer)])
            for layer in range(self.num_layers)
        ]
        return Decoder(
            parts.embedding(embedding, _embedding_scale(self.hidden_size, embedding.dtype)),
            layers,
            _norm(ops, weights.take(self.named(FINAL_NORM)), self.rms_norm_eps),
            parts.lm_head(tied, self.final_softcap),
        )

    def _norms(self, layer: int) -> dict[str, int]:
        prefix = self.named_layer(layer)
        norms = {f"{prefix}.{name}.weight": self.hidden_size for name in _LAYER_NORMS}
        heads = {f"{prefix}.{name}.weight": self.head_size for name in (_Q_NORM, _K_NORM)}
        return norms | (heads if self.qk_norm else {})

    def _ropes(self) -> tuple[RopeSpec, ...]:
        """Each that some layer has, once."""
        return tuple(dict.fromkeys(map(self._rope_of, range(self.num_layers))))

    def _rope_of(self, layer: int) -> RopeSpec:
        return self.rope if self.windows[layer] is None else self.windowed_rope


def _build_layer(
    spec: GemmaSpec, layer: int, parts: DecoderParts, cos_sin: Tensor
) -> SequentialLayer:
    ops, linears = parts.ops, spec.layer_linears(layer)

    def norm(name: str) -> RMSNorm:
        tensor = f"{spec.named_layer(layer)}.{name}.weight"
        return _norm(ops, parts.weights.take(tensor), spec.rms_norm_eps)

    attention = Attention(
        ops,
        parts.heads,
        layer=layer,
        qkv=parts.linear(linears.qkv),
        output=parts.gathered_linear(linears.output),
        q_norm=norm(_Q_NORM) if spec.qk_norm else None,
        k_norm=norm(_K_NORM) if spec.qk_norm else None,
        cos_sin=cos_sin,
        scale=spec.attention_scale,
        sliding_window=spec.windows[layer],
        softcap=spec.attention_softcap,
    )
    assert linears.mlp is not None, "a Gemma has no experts"
    mlp_in = parts.linear(linears.mlp.into)
    mlp_out = parts.gathered_linear(linears.mlp.out)
    mlp = GatedMLP(ops, mlp_in, "gelu_tanh", mlp_out)
    return SequentialLayer(ops, attention, mlp, LayerNorms(*map(norm, _LAYER_NORMS)))


def _norm(ops: Ops, weight: Tensor, eps: float) -> RMSNorm:
    return RMSNorm(ops, 1.0 + weight.float(), eps)


def _embedding_scale(hidden_size: int, dtype: torch.dtype) -> float:
    """The root of the hidden size, rounded to the model's dtype as the trained models had it."""
    return torch.tensor(hidden_size**0.5).to(dtype).item()


# ── config.json ─────────────────────────────────────────────────────────────────────────────────


def read_gemma2(settings: Settings, architecture: str) -> GemmaSpec:
    """The facts of a Gemma 2; faults are among the findings of `settings`."""
    max_positions = read_max_positions(settings, 8192)
    refuse_partial(settings)
    rope, _ = read_rope(settings, max_positions)
    return _read(
        settings,
        architecture,
        # Every other layer, beginning with the first.
        default_types=lambda layer: FULL if layer % 2 else SLIDING,
        max_positions=max_positions,
        rope=rope,
        windowed_rope=rope,
        attention_softcap=settings.optional_number("attn_logit_softcapping", 50.0),
        final_softcap=settings.optional_number("final_logit_softcapping", 30.0),
        qk_norm=False,
        vocab_size=256_000,
    )


def read_gemma3(settings: Settings, architecture: str) -> GemmaSpec:
    """The facts of a Gemma 3; faults are among the findings of `settings`."""
    max_positions = read_max_positions(settings, 131_072)
    if settings.get("attn_logit_softcapping") is not None:
        settings.refuse("attn_logit_softcapping is not supported in Gemma 3")
    period = settings.integer("sliding_window_pattern", 6)
    refuse_partial(settings)
    rope, windowed_rope = read_ropes_by_kind(
        settings,
        max_positions,
        default_theta=1_000_000.0,
        windowed_key="rope_local_base_freq",
        default_windowed_theta=10_000.0,
    )
    return _read(
        settings,
        architecture,
        default_types=lambda layer: SLIDING if (layer + 1) % period else FULL,
        max_positions=max_positions,
        rope=rope,
        windowed_rope=windowed_rope,
        attention_softcap=None,
        final_softcap=settings.optional_number("final_logit_softcapping", None),
        qk_norm=True,
        vocab_size=262_208,
    )


def read_gemma3_multimodal(settings: Settings, architecture: str) -> GemmaSpec:
    """The facts of the text model in a Gemma 3 for texts and images."""
    logger.info("%s: its text model is served; images are not supported", architecture)
    spec = read_gemma3(settings.part("text_config"), architecture)
    return replace(
        spec,
        dtype=stored_dtype(settings) or spec.dtype,
        tie_word_embeddings=settings.flag("tie_word_embeddings", True),
    )


def _read(
    settings: Settings,
    architecture: str,
    *,
    default_types: Callable[[int], str],
    max_positions: int,
    rope: RopeSpec,
    windowed_rope: RopeSpec,
    attention_softcap: float | None,
    final_softcap: float | None,
    qk_norm: bool,
    vocab_size: int,
) -> GemmaSpec:
    """What both read alike; `vocab_size` is for configs that are silent."""
    _refuse_other_arithmetic(settings)
    num_layers = settings.integer("num_hidden_layers", 26)
    kinds = layer_types(settings, list(map(default_types, range(num_layers))))
    has_bias = attention_bias(settings)
    spec = GemmaSpec(
        architecture=architecture,
        vocab_size=settings.integer("vocab_size", vocab_size),
        hidden_size=settings.integer("hidden_size", 2304),
        intermediate_size=settings.integer("intermediate_size", 9216),
        num_heads=settings.integer("num_attention_heads", 8),
        num_kv_heads=settings.integer("num_key_value_heads", 4),
        head_size=settings.integer("head_dim", 256),
        windows=windows_of(kinds, settings.integer("sliding_window", 4096)),
        qkv_bias=has_bias,
        output_bias=has_bias,
        tie_word_embeddings=settings.flag("tie_word_embeddings", True),
        max_positions=max_positions,
        dtype=stored_dtype(settings),
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=rope,
        windowed_rope=windowed_rope,
        attention_scale=settings.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=attention_softcap,
        final_softcap=final_softcap,
        qk_norm=qk_norm,
    )
    check_heads(settings, spec)
    for each in {rope, windowed_rope}:
        check_factors(settings, each, spec.head_size)
    return spec


def _refuse_other_arithmetic(settings: Settings) -> None:
    activation = settings.text("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        settings.refuse(f"hidden_activation {activation!r} is not supported; gelu_pytorch_tanh is")
    if settings.flag("use_bidirectional_attention", False):
        settings.refuse("use_bidirectional_attention is not supported")
    if settings.is_null("sliding_window"):
        settings.refuse("sliding_window must be a number of tokens, is null")
