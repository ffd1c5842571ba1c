"""What config.json says of rotary positions, in its old spelling and its new one.

Old: rope_theta beside a `rope_scaling` object, whose kind is "type" or "rope_type". New: all of it
in `rope_parameters`.
"""

from __future__ import annotations

import math

from lora_serve.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)
from lora_serve.models.common_config import FULL, SLIDING
from lora_serve.models.settings import Settings

_PARTIAL = "partial_rotary_factor"
MOST_POSITIONS = 2**24  # tables of angles have a row for each
KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


def read_max_positions(settings: Settings, default: int | None = None) -> int:
    """How many positions the model was made for, without what its rotary scaling adds."""
    return settings.integer("max_position_embeddings", default, most=MOST_POSITIONS)


def read_rope(
    settings: Settings, max_position_embeddings: int, default_theta: float = 10000.0
) -> tuple[RopeSpec, int]:
    """The rotary facts, and how many positions the model has with its scaling."""
    key = _rope_key(settings)
    rope = settings.part(key)
    theta = settings.number("rope_theta", rope.number("rope_theta", default_theta))
    spec = read_scaling(rope, key, theta, max_position_embeddings, settings)
    stretched = _stretched(spec, max_position_embeddings)
    if stretched > MOST_POSITIONS:
        settings.refuse(f"{key} stretches the context to more than {MOST_POSITIONS} positions")
        stretched = max_position_embeddings
    return spec, int(stretched)


def _rope_key(settings: Settings) -> str:
    return "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"


def read_rotary_size(settings: Settings, head_size: int, default_share: float = 1.0) -> int:
    """How many channels of a head turn, the first: `partial_rotary_factor` of them."""
    rope = settings.get(_rope_key(settings))
    stated = rope.get(_PARTIAL) if isinstance(rope, dict) else None
    part = Settings(
        {_PARTIAL: stated if settings.get(_PARTIAL) is None else settings.get(_PARTIAL)}
    )
    part.findings = settings.findings
    share = part.number(_PARTIAL, default_share)
    size = int(head_size * share)
    if share > 1 or size % 2 or not size:
        settings.refuse(f"{_PARTIAL} {share} of heads of {head_size} is no even number of channels")
        return head_size
    return size


def refuse_partial(settings: Settings) -> None:
    """Refuse heads that turn in part, where a family's turn as a whole."""
    for each in (settings, settings.part(_rope_key(settings))):
        if each.number(_PARTIAL, 1.0) != 1.0:
            settings.refuse(f"{_PARTIAL} other than 1 is not supported")


def read_ropes_by_kind(
    settings: Settings,
    max_positions: int,
    *,
    default_theta: float,
    windowed_key: str,
    default_windowed_theta: float,
) -> tuple[RopeSpec, RopeSpec]:
    """Read the ropes of layers without and with a window: by layer type, or in older keys.

    Older configs scale layers without a window alone. windowed_key: names the others' base there.
    """
    if settings.get("rope_parameters") is None:
        theta = settings.number("rope_theta", default_theta)
        rope = read_scaling(settings.part("rope_scaling"), "rope_scaling", theta, max_positions)
        return rope, RopeSpec(settings.number(windowed_key, default_windowed_theta))
    parameters = settings.part("rope_parameters")
    if "rope_type" in parameters or "rope_theta" in parameters:
        settings.refuse(f"rope_parameters must be given for {FULL} and {SLIDING} apart")
    full, windowed = parameters.part(FULL), parameters.part(SLIDING)
    return (
        read_scaling(full, FULL, full.number("rope_theta", default_theta), max_positions),
        read_scaling(
            windowed,
            SLIDING,
            windowed.number("rope_theta", default_windowed_theta),
            max_positions,
        ),
    )


def read_scaling(
    rope: Settings,
    key: str,
    theta: float,
    max_position_embeddings: int,
    around: Settings | None = None,
) -> RopeSpec:
    """The rotary facts in the object `rope`, which the config has below `key`.

    around: the config, which may have the original context beside it.
    """
    match rope.text("rope_type", rope.text("type", "default")):
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, LinearScaling(rope.number("factor")))
        case "llama3":
            return RopeSpec(theta, _llama3(rope))
        case "yarn":
            return RopeSpec(theta, _yarn(rope, max_position_embeddings))
        case "longrope" | "su":
            return RopeSpec(theta, _longrope(rope, max_position_embeddings, around or rope))
        case "dynamic":
            return RopeSpec(theta, DynamicScaling(rope.number("factor"), max_position_embeddings))
        case kind:
            rope.refuse(f"{key} of type {kind!r} is not supported; {', '.join(KINDS)} are")
            return RopeSpec(theta)


def check_factors(settings: Settings, rope: RopeSpec, rotary_size: int) -> None:
    """See that there is a factor of LongRoPE for each pair of channels that turn."""
    if isinstance(rope.scaling, LongRopeScaling):
        for key in ("short_factor", "long_factor"):
            count = len(getattr(rope.scaling, key))
            if count != rotary_size // 2:
                settings.refuse(f"{key} has {count} numbers; {rotary_size // 2} are needed")
    if isinstance(rope.scaling, DynamicScaling) and rotary_size == 2:
        settings.refuse("rope of type 'dynamic' needs more than two channels that turn")


def _stretched(rope: RopeSpec, max_position_embeddings: int) -> float:
    match rope.scaling:
        case LinearScaling(factor) | DynamicScaling(factor):
            return max_position_embeddings * factor
        case YarnScaling() as yarn:
            return max(max_position_embeddings, yarn.original_max_position_embeddings * yarn.factor)
        case _:
            return max_position_embeddings


def _llama3(rope: Settings) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )


def _longrope(rope: Settings, max_position_embeddings: int, around: Settings) -> LongRopeScaling:
    key = "original_max_position_embeddings"
    stated = around if rope.get(key) is None and around.get(key) is not None else rope
    original = stated.integer(key, max_position_embeddings, least=2)  # its logarithm divides
    factor = rope.number("factor", max_position_embeddings / original)
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", amplitude),
    )


def _yarn(rope: Settings, max_position_embeddings: int) -> YarnScaling:
    original = rope.integer("original_max_position_embeddings", max_position_embeddings)
    factor = rope.number("factor", max_position_embeddings / original)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", _yarn_amplitude(rope, factor)),
        truncate=rope.flag("truncate", True),
    )


def _yarn_amplitude(rope: Settings, factor: float) -> float:
    """What multiplies cos and sin where the config does not say it, as DeepSeek's mscale has it."""
    growth = 0.1 * math.log(max(factor, 1.0))
    keys = ("mscale", "mscale_all_dim")
    if not all(map(rope.get, keys)):
        return growth + 1.0
    scale, scale_all_dim = map(rope.number, keys)
    return (growth * scale + 1.0) / (growth * scale_all_dim + 1.0)
