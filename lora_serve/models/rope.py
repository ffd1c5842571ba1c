"""What config.json says of rotary positions, in its old spelling and its new one.

Old: rope_theta beside a `rope_scaling` object, whose kind is "type" or "rope_type". New: all of it
in `rope_parameters`. What a config says twice, programs take from one place or the other, so both
must be equal.
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

ROPE_KEYS = _NEWER, _OLDER = "rope_parameters", "rope_scaling"
_THETA, _PARTIAL = "rope_theta", "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_MOST_SHOWN = 120  # characters of a faulty value
MOST_POSITIONS = 2**24  # tables of angles have a row for each
KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


def read_max_positions(settings: Settings, default: int | None = None) -> int:
    """How many positions the model was made for, without what its rotary scaling adds."""
    return settings.integer("max_position_embeddings", default, most=MOST_POSITIONS)


def read_rope(
    settings: Settings, max_position_embeddings: int, default_theta: float = 10000.0
) -> tuple[RopeSpec, int]:
    """The rotary facts, and how many positions the model has with its scaling."""
    key = rope_key(settings)
    rope = settings.part(key)
    if kinds := rope.objects():
        settings.refuse(
            f"{key} must be one for all layers of this family, not one each for {', '.join(kinds)}"
        )
    newer, older, theta = map(settings.get, (_NEWER, _OLDER, _THETA))
    if newer and older and _in_one_spelling(newer, theta) != _in_one_spelling(older, theta):
        _refuse_both(settings)
    theta = _saying(_THETA, rope, settings, key).number(_THETA, default_theta)
    spec = read_scaling(rope, key, theta, max_position_embeddings, settings)
    stretched = _stretched(spec, max_position_embeddings)
    if stretched > MOST_POSITIONS:
        settings.refuse(f"{key} stretches the context to more than {MOST_POSITIONS} positions")
        stretched = max_position_embeddings
    return spec, int(stretched)


def rope_key(settings: Settings) -> str:
    """The key of the object that has the rotary facts, if there is any."""
    return _NEWER if settings.get(_NEWER) else _OLDER


def _in_one_spelling(rope: object, theta: object) -> object:
    """What an object of rotary facts says. theta: said beside it."""
    if not isinstance(rope, dict):
        return rope
    stated = {key: value for key, value in rope.items() if value is not None and key != "type"}
    return {_THETA: theta, "rope_type": rope.get("type") or "default", **stated}


def _refuse_both(settings: Settings) -> None:
    """Programs take one of the two, and of some settings, such as rope_theta, neither."""
    older, newer = (str(settings.get(key))[:_MOST_SHOWN] for key in (_OLDER, _NEWER))
    settings.contradict(
        f"{_OLDER} {older} and {_NEWER} {newer} contradict each other; say all of it, {_THETA} "
        f"too, in {_NEWER}, and take {_OLDER} out"
    )


def _saying(
    key: str, rope: Settings, around: Settings, name: str, outer_key: str | None = None
) -> Settings:
    """Whichever says `key`: the object of rotary facts, or else the config around it.

    The config is refused if both do, and differ. name: of the object. outer_key: what the config
    calls it, if not alike.
    """
    inner, outer = rope.get(key), around.get(outer_key or key)
    if None not in (inner, outer) and inner != outer:
        around.contradict(
            f"{outer_key or key} is {str(outer)[:_MOST_SHOWN]} beside {name}, and {key} in it "
            f"is {str(inner)[:_MOST_SHOWN]}; take out the one that is wrong"
        )
    return around.replaced(**{key: outer}) if inner is None else rope


def read_rotary_size(settings: Settings, head_size: int, default_share: float = 1.0) -> int:
    """How many channels of a head turn, the first: `partial_rotary_factor` of them."""
    key = rope_key(settings)
    stated = _saying(_PARTIAL, settings.part(key), settings, key)
    share = stated.number(_PARTIAL, default_share)
    size = int(head_size * share)
    if share > 1 or size % 2 or not size:
        settings.refuse(f"{_PARTIAL} {share} of heads of {head_size} is no even number of channels")
        return head_size
    return size


def refuse_partial(settings: Settings) -> None:
    """Refuse heads that turn in part, where a family's turn as a whole."""
    rope = settings.part(rope_key(settings))
    for each in (settings, rope, *map(rope.part, rope.objects())):
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
    older = settings.part(_OLDER)
    if not settings.get(_NEWER):
        theta = _saying(_THETA, older, settings, _OLDER).number(_THETA, default_theta)
        rope = read_scaling(older, _OLDER, theta, max_positions)
        local = settings.number(windowed_key, default_windowed_theta)
        if windowed_key == _THETA and local != default_windowed_theta:
            settings.contradict(
                f"{_THETA} {local} is that of all layers to some versions of transformers, and to "
                f"others not that of {SLIDING}; say it for both kinds of layers in {_NEWER}"
            )
        return rope, RopeSpec(local)
    parameters = settings.part(_NEWER)
    if "rope_type" in parameters or _THETA in parameters:
        settings.refuse(f"{_NEWER} must be given for {FULL} and {SLIDING} apart")
    full, windowed = parameters.part(FULL), parameters.part(SLIDING)
    stated, more = parameters.get(FULL), settings.get(_OLDER)
    if more and not _says_all_of(stated, more):
        _refuse_both(settings)
    theta = _saying(_THETA, full, settings, FULL).number(_THETA, default_theta)
    base = _saying(_THETA, windowed, settings, SLIDING, windowed_key)
    return (
        read_scaling(full, FULL, theta, max_positions),
        read_scaling(windowed, SLIDING, base.number(_THETA, default_windowed_theta), max_positions),
    )


def _says_all_of(rope: object, part: object) -> bool:
    """Whether an object of rotary facts says already what `part` says."""
    if not isinstance(rope, dict) or not isinstance(part, dict):
        return False
    whole, said = (_in_one_spelling(each, rope.get(_THETA)) for each in (rope, part))
    return isinstance(whole, dict) and isinstance(said, dict) and said.items() <= whole.items()


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
    around = around or rope

    def original(least: int = 1) -> int:
        stated = _saying(_ORIGINAL, rope, around, key)
        return stated.integer(_ORIGINAL, max_position_embeddings, least=least)

    match rope.text("rope_type", rope.text("type", "default")):
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, LinearScaling(rope.number("factor")))
        case "llama3":
            return RopeSpec(theta, _llama3(rope, original()))
        case "yarn":
            return RopeSpec(theta, _yarn(rope, max_position_embeddings, original()))
        case "longrope" | "su":
            # Its logarithm divides.
            return RopeSpec(theta, _longrope(rope, max_position_embeddings, original(least=2)))
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


def _llama3(rope: Settings, original: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=original,
    )


def _longrope(rope: Settings, max_position_embeddings: int, original: int) -> LongRopeScaling:
    factor = rope.number("factor", max_position_embeddings / original)
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", amplitude),
    )


def _yarn(rope: Settings, max_position_embeddings: int, original: int) -> YarnScaling:
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
