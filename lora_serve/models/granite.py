"""Granite 3: dense decoders that scale embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.common_config import attention_bias, factor
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings


def read_granite(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Granite 3; faults are among the findings of `settings`."""
    has_bias = attention_bias(settings)
    windows = (None,) * settings.integer("num_hidden_layers")
    spec = read_dense(settings, architecture, windows=windows)
    return replace(
        spec,
        qkv_bias=has_bias,
        output_bias=has_bias,
        embedding_scale=factor(settings, "embedding_multiplier"),
        attention_scale=settings.number("attention_multiplier", 1.0),
        residual_scale=factor(settings, "residual_multiplier"),
        logit_scale=_inverse(factor(settings, "logits_scaling")),
    )


def _inverse(divisor: float | None) -> float | None:
    return None if divisor is None else 1 / divisor
