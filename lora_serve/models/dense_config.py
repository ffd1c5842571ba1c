"""Reads the facts of a dense decoder in config.json, but for those that a family fixes."""

from __future__ import annotations

from lora_serve.models.common_config import check_heads, stored_dtype
from lora_serve.models.dense import DenseSpec
from lora_serve.models.rope import read_rope
from lora_serve.models.settings import Settings


def read_dense(
    settings: Settings,
    architecture: str,
    *,
    windows: tuple[int | None, ...],
    qkv_bias: bool,
    output_bias: bool = False,
    qk_norm: bool = False,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
) -> DenseSpec:
    """The facts of a model; faults are among the findings of `settings`.

    Args:
        settings: the config.
        architecture: as the config names it.
        windows: of each layer.
        qkv_bias: whether q k v have a bias.
        output_bias: whether o has one.
        qk_norm: as DenseSpec has it.
        num_kv_heads: where the config is silent; None: as many as heads.
        head_size: where the config is silent; None: hidden_size divided by the heads.
    """
    _refuse_other_arithmetic(settings)
    num_heads = settings.integer("num_attention_heads")
    hidden_size = settings.integer("hidden_size")
    rope, max_positions = read_rope(settings, settings.integer("max_position_embeddings"))
    spec = DenseSpec(
        architecture=architecture,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", num_kv_heads or num_heads),
        head_size=settings.integer("head_dim", head_size or hidden_size // num_heads),
        windows=windows,
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=max_positions,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        tie_word_embeddings=settings.flag("tie_word_embeddings", False),
        dtype=stored_dtype(settings),
    )
    check_heads(settings, spec)
    return spec


def _refuse_other_arithmetic(settings: Settings) -> None:
    if settings.text("hidden_act", "silu") not in ("silu", "swish"):
        settings.refuse(f"hidden_act {settings.get('hidden_act')!r} is not supported; silu is")
    if settings.flag("mlp_bias", False):
        settings.refuse("mlp_bias is not supported")
