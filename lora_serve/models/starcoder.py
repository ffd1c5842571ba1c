"""StarCoder 2: a decoder with layer norms, plain MLPs, and biases throughout."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.decoder_shape import ProjectionNames
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings

_PROJECTIONS = ProjectionNames(mlp_in=("mlp.c_fc",), mlp_out="mlp.c_proj")
_NUM_KV_HEADS = 2  # where the config is silent


def read_starcoder2(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a StarCoder 2; faults are among the findings of `settings`."""
    has_bias = settings.flag("use_bias", True)
    has_window = settings.get("sliding_window") is not None
    window = settings.integer("sliding_window") if has_window else None
    spec = read_dense(
        settings,
        architecture,
        windows=(window,) * settings.integer("num_hidden_layers"),
        num_kv_heads=_NUM_KV_HEADS,
        eps=("norm_epsilon", 1e-5),
        activation="gelu_tanh",
        is_tied=True,
    )
    return replace(
        spec,
        qkv_bias=has_bias,
        output_bias=has_bias,
        projections=_PROJECTIONS,
        mlp_bias=has_bias,
        is_gated=False,
        layer_norm=True,
        norm_bias=True,
    )
