"""Granite 3 and 4: dense decoders that scale embeddings, scores, residuals and logits.

Of Granite 4 those that have attention in all layers, and no experts.
"""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.common_config import attention_bias, factor
from lora_serve.models.decoder_shape import ProjectionNames
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings

_ATTENTION = "attention"
_SHARED_MLP = ProjectionNames(
    mlp_in=("shared_mlp.input_linear",), mlp_out="shared_mlp.output_linear"
)


def read_granite(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Granite 3; faults are among the findings of `settings`."""
    has_bias = attention_bias(settings)
    spec = read_dense(
        settings,
        architecture,
        windows=(None,) * settings.integer("num_hidden_layers"),
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    return replace(
        spec,
        embedding_scale=factor(settings, "embedding_multiplier"),
        attention_scale=settings.number("attention_multiplier", 1.0),
        residual_scale=factor(settings, "residual_multiplier"),
        logit_scale=_inverse(factor(settings, "logits_scaling")),
    )


def _inverse(divisor: float | None) -> float | None:
    return None if divisor is None else 1 / divisor
