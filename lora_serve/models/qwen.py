"""Qwen 2 and 3: dense decoders, whose later layers have a sliding window if the config asks."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.common_config import FULL, SLIDING, attention_bias, layer_types, windows_of
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings

_NUM_KV_HEADS = 32  # where the config is silent, as the three below
_QWEN3_HEAD_SIZE = 128
_WINDOW = 4096
_FIRST_WINDOWED_LAYER = 28


def read_qwen2(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Qwen 2; faults are among the findings of `settings`."""
    spec = read_dense(
        settings, architecture, windows=_windows(settings), num_kv_heads=_NUM_KV_HEADS
    )
    return replace(spec, qkv_bias=True)


def read_qwen3(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Qwen 3; faults are among the findings of `settings`."""
    has_bias = attention_bias(settings)
    spec = read_dense(
        settings,
        architecture,
        windows=_windows(settings),
        num_kv_heads=_NUM_KV_HEADS,
        head_size=_QWEN3_HEAD_SIZE,
    )
    return replace(spec, qkv_bias=has_bias, output_bias=has_bias, qk_norm=True)


def _windows(settings: Settings) -> tuple[int | None, ...]:
    """Each layer's window: with use_sliding_window, and from max_window_layers on."""
    num_layers = settings.integer("num_hidden_layers")
    if settings.is_null("sliding_window") or not settings.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = settings.integer("sliding_window", _WINDOW)
    first = settings.integer("max_window_layers", _FIRST_WINDOWED_LAYER, least=0)
    default = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return windows_of(layer_types(settings, default), window)
