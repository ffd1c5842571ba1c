"""Reads the facts of a dense decoder in config.json, but for those that a family fixes."""

from __future__ import annotations

from lora_serve.layers.rotary import RopeSpec
from lora_serve.models.common_config import check_heads, stored_dtype
from lora_serve.models.dense import DenseSpec
from lora_serve.models.rope import (
    check_factors,
    read_max_positions,
    read_rope,
    read_rotary_size,
    refuse_partial,
)
from lora_serve.models.settings import Settings

_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new")}


def read_dense(
    settings: Settings,
    architecture: str,
    *,
    windows: tuple[int | None, ...],
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    activation: str = "silu",
    default_theta: float = 10000.0,
    ropes: tuple[RopeSpec, RopeSpec] | None = None,
    rotary_share: float | None = None,
    is_tied: bool = False,
) -> DenseSpec:
    """The facts of a model; faults are among the findings of `settings`.

    What no argument says is as in Llama, without biases and norms of q and k; a family that has
    other facts replaces them in what this returns.

    Args:
        settings: the config.
        architecture: as the config names it.
        windows: of each layer.
        num_kv_heads: where the config is silent; None: as many as heads.
        head_size: where the config is silent; None: hidden_size divided by the heads.
        eps: the key of the norms' eps, and its value where the config is silent.
        activation: the one that the family's MLPs have, as DenseSpec has it.
        default_theta: the rotary base where the config is silent.
        ropes: of layers without and with a window, where the family has them apart. Positions that
            their scaling adds are counted in the config already.
        rotary_share: what part of a head turns where the config is silent; None: always all.
        is_tied: whether the LM head is the embedding, where the config is silent.
    """
    _refuse_other_arithmetic(settings, activation)
    num_heads = settings.integer("num_attention_heads")
    hidden_size = settings.integer("hidden_size")
    head_size = settings.integer("head_dim", head_size or hidden_size // num_heads)
    max_positions = read_max_positions(settings)
    if ropes is None:
        rope, max_positions = read_rope(settings, max_positions, default_theta)
        ropes = rope, rope
    if rotary_share is None:
        refuse_partial(settings)
    rotary_size = head_size
    if rotary_share is not None:
        rotary_size = read_rotary_size(settings, head_size, rotary_share)
    spec = DenseSpec(
        architecture=architecture,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", num_kv_heads or num_heads),
        head_size=head_size,
        windows=windows,
        rms_norm_eps=settings.number(*eps),
        rope=ropes[0],
        windowed_rope=None if ropes[1] == ropes[0] else ropes[1],
        max_positions=max_positions,
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        tie_word_embeddings=settings.flag("tie_word_embeddings", is_tied),
        dtype=stored_dtype(settings),
        rotary_size=None if rotary_size == head_size else rotary_size,
        activation=activation,
    )
    check_heads(settings, spec)
    for each in {*ropes}:
        check_factors(settings, each, rotary_size)
    return spec


def _refuse_other_arithmetic(settings: Settings, activation: str) -> None:
    known = _ACTIVATIONS[activation]
    if settings.text("hidden_act", known[0]) not in known:
        settings.refuse(
            f"hidden_act {settings.get('hidden_act')!r} is not supported; {known[0]} is"
        )
    if settings.flag("mlp_bias", False):
        settings.refuse("mlp_bias is not supported")
