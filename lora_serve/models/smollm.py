"""SmolLM 3: a dense decoder, some of whose layers do not rotate q and k."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.common_config import FULL, SLIDING, attention_bias, layer_types, windows_of
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings

_THETA = 2_000_000.0  # where the config is silent, as the two below
_NUM_KV_HEADS = 4
_UNROTATED_PERIOD = 4


def read_smollm3(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a SmolLM 3; faults are among the findings of `settings`."""
    unrotated = _unrotated(settings)
    has_bias = attention_bias(settings)
    spec = read_dense(
        settings,
        architecture,
        windows=_windows(settings, unrotated),
        num_kv_heads=_NUM_KV_HEADS,
        default_theta=_THETA,
        is_tied=True,
    )
    return replace(spec, qkv_bias=has_bias, output_bias=has_bias, unrotated=unrotated)


def _unrotated(settings: Settings) -> tuple[int, ...]:
    """Layers that `no_rope_layers` has a 0 for; without it, the last of each period."""
    num_layers = settings.integer("num_hidden_layers")
    period = settings.integer("no_rope_layer_interval", _UNROTATED_PERIOD)
    rotated = settings.get("no_rope_layers")
    if rotated is None:
        return tuple(range(period - 1, num_layers, period))
    if not isinstance(rotated, list) or len(rotated) < num_layers or not {*rotated} <= {0, 1}:
        settings.refuse(f"no_rope_layers must be a 0 or 1 for each of {num_layers} layers")
        return ()
    return tuple(layer for layer in range(num_layers) if not rotated[layer])


def _windows(settings: Settings, unrotated: tuple[int, ...]) -> tuple[int | None, ...]:
    """Each layer's: with use_sliding_window, unrotated ones have one, if nothing else is said."""
    layers = range(settings.integer("num_hidden_layers"))
    if settings.get("sliding_window") is None or not settings.flag("use_sliding_window", False):
        return (None,) * len(layers)
    default = [SLIDING if layer in unrotated else FULL for layer in layers]
    return windows_of(layer_types(settings, default), settings.integer("sliding_window"))
