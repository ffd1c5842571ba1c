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
    _refuse_partial(settings)
    spec = read_scaling(rope, key, theta, max_position_embeddings)
    return spec, _stretched(spec, max_position_embeddings)


def read_scaling(rope: Settings, key: str, theta: float, max_position_embeddings: int) -> RopeSpec:
    """The rotary facts in the object `rope`, which the config has below `key`."""
    _refuse_partial(rope)
    match rope.text("rope_type", rope.text("type", "default")):
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, LinearScaling(rope.number("factor")))
        case "llama3":
            return RopeSpec(theta, _llama3(rope))
        case "yarn":
            return RopeSpec(theta, _yarn(rope, max_position_embeddings))
        case kind:
            rope.refuse(f"{key} of type {kind!r} is not supported; {', '.join(KINDS)} are")
            return RopeSpec(theta)


def _refuse_partial(settings: Settings) -> None:
    if settings.number("partial_rotary_factor", 1.0) != 1.0:
        settings.refuse("partial_rotary_factor other than 1 is not supported")


def _stretched(rope: RopeSpec, max_position_embeddings: int) -> int:
    match rope.scaling:
        case LinearScaling(factor):
            return int(max_position_embeddings * factor)
        case YarnScaling() as yarn:
            stretched = int(yarn.original_max_position_embeddings * yarn.factor)
            return max(max_position_embeddings, stretched)
        case _:
            return max_position_embeddings


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
