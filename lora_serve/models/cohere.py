"""Cohere's Command R, R+ and R7B: decoders whose attention and MLP stand side by side.

Command R+ norms each head of q and k, with weights of its own. Command R7B (Cohere2) has windows,
and rotates q and k in layers with one only.
"""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.common_config import (
    FULL,
    SLIDING,
    attention_bias,
    factor,
    layer_types,
    windows_of,
)
from lora_serve.models.dense import DenseSpec, NormNames
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings

_NORMS = NormNames(before_mlp=None)
_LOGIT_SCALE = 0.0625  # where the config is silent, as all below
_COHERE_THETA = 500_000.0
_COHERE2_THETA = 10_000.0
_COHERE2_WINDOW = 4096
_COHERE2_FULL_PERIOD = 4


def read_cohere(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Command R; faults are among the findings of `settings`."""
    windows = (None,) * settings.integer("num_hidden_layers")
    spec = _read(settings, architecture, windows, _COHERE_THETA)
    return replace(spec, qk_layer_norm=settings.flag("use_qk_norm", False))


def read_cohere2(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Command R7B; faults are among the findings of `settings`."""
    layers = range(settings.integer("num_hidden_layers"))
    period = settings.integer("sliding_window_pattern", _COHERE2_FULL_PERIOD)
    kinds = layer_types(settings, [SLIDING if (i + 1) % period else FULL for i in layers])
    if settings.is_null("sliding_window"):
        settings.refuse("sliding_window must be a number of tokens, is null")
    window = settings.integer("sliding_window", _COHERE2_WINDOW)
    spec = _read(settings, architecture, windows_of(kinds, window), _COHERE2_THETA)
    return replace(spec, unrotated=tuple(i for i in layers if kinds[i] == FULL))


def _read(
    settings: Settings, architecture: str, windows: tuple[int | None, ...], theta: float
) -> DenseSpec:
    has_bias = attention_bias(settings)
    spec = read_dense(
        settings,
        architecture,
        windows=windows,
        eps=("layer_norm_eps", 1e-5),
        default_theta=theta,
        is_tied=True,
    )
    return replace(
        spec,
        qkv_bias=has_bias,
        output_bias=has_bias,
        norms=_NORMS,
        layer_norm=True,
        is_parallel=True,
        is_interleaved=True,
        logit_scale=factor(settings, "logit_scale", _LOGIT_SCALE),
    )
