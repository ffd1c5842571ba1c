"""Keys of config.json that families read alike."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.models.decoder_shape import DecoderShape
from lora_serve.models.settings import Settings

FULL, SLIDING = "full_attention", "sliding_attention"
# Why a layer cannot be served that carries more along than what KV blocks hold.
RECURRENT_STATE = (
    "carry a recurrent state from token to token; the KV cache holds keys and values alone"
)


def stored_dtype(settings: Settings) -> str | None:
    """The dtype that the config names, in its new spelling or its old one."""
    return settings.text("dtype", "") or settings.text("torch_dtype", "") or None


def layer_types(settings: Settings, default: Sequence[str]) -> Sequence[str]:
    """FULL or SLIDING of each layer: what `layer_types` says, or the family's default."""
    stated = settings.get("layer_types")
    if stated is None:
        return default
    kinds = list(map(str, stated)) if isinstance(stated, list) else [repr(stated)]
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        settings.refuse(
            f"layers of {', '.join(unknown)} are not supported; those of {FULL} and {SLIDING} are"
        )
    elif len(kinds) != len(default):
        settings.refuse(f"layer_types names {len(kinds)} layers of {len(default)}")
    else:
        return kinds
    return default


def windows_of(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer, where layers of type SLIDING have the config's."""
    return tuple(window if kind == SLIDING else None for kind in kinds)


def refuse_quantised(settings: Settings) -> None:
    for key in ("quantization_config", "compression_config"):
        if settings.get(key):
            settings.refuse(f"quantised checkpoints are not supported ({key} is set)")


def check_heads(settings: Settings, shape: DecoderShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        settings.refuse(
            f"num_attention_heads {shape.num_heads} is not a multiple of num_key_value_heads "
            f"{shape.num_kv_heads}"
        )
    if shape.head_size % 2:
        settings.refuse(f"head_dim {shape.head_size} is odd; rotary positions need pairs")


def attention_bias(settings: Settings) -> bool:
    """Whether all four linear layers of attention have a bias, or none."""
    return settings.flag("attention_bias", False)


def factor(settings: Settings, key: str, default: float = 1.0) -> float | None:
    """What something is multiplied by, above 0; None for 1."""
    value = settings.number(key, default)
    return None if value == 1.0 else value
