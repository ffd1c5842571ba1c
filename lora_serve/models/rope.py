"""What config.json says of rotary positions, in its old spelling and its new one.

Old: rope_theta beside a `rope_scaling` object, whose kind is "type" or "rope_type". New: all of it
in `rope_parameters`.
"""

from __future__ import annotations

import math

from lora_serve.layers.rotary import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from lora_serve.models.settings import Settings

KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(settings: Settings, max_position_embeddings: int) -> tuple[RopeSpec, int]:
    """The rotary facts, and how many positions the model has with its scaling."""
    key = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    rope = settings.part(key)
    theta = settings.number("rope_theta", rope.number("rope_theta", 10000.0))
    for part in (settings, rope):
        if part.number("partial_rotary_factor", 1.0) != 1.0:
            settings.refuse("partial_rotary_factor other than 1 is not supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "linear":
        linear = LinearScaling(rope.number("factor"))
        return RopeSpec(theta, linear), int(max_position_embeddings * linear.factor)
    if kind == "llama3":
        return RopeSpec(theta, _llama3(rope)), max_position_embeddings
    if kind == "yarn":
        yarn = _yarn(rope, max_position_embeddings)
        stretched = int(yarn.original_max_position_embeddings * yarn.factor)
        return RopeSpec(theta, yarn), max(max_position_embeddings, stretched)
    if kind != "default":
        settings.refuse(f"{key} of type {kind!r} is not supported; {', '.join(KINDS)} are")
    return RopeSpec(theta), max_position_embeddings


def _llama3(rope: Settings) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )


def _yarn(rope: Settings, max_position_embeddings: int) -> YarnScaling:
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key) is not None:
            rope.refuse(f"yarn with {key} is not supported")
    original = rope.integer("original_max_position_embeddings", max_position_embeddings)
    factor = rope.number("factor", max_position_embeddings / original)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),
        truncate=rope.flag("truncate", True),
    )
