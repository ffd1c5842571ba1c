"""Phi 3 and Phi 4: dense decoders whose checkpoints have q k v, and gate and up, as one tensor."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.decoder_shape import ProjectionNames
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings

_PROJECTIONS = ProjectionNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))


def read_phi3(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Phi 3 or Phi 4; faults are among the findings of `settings`."""
    has_window = settings.get("sliding_window") is not None
    window = settings.integer("sliding_window") if has_window else None
    spec = read_dense(
        settings,
        architecture,
        windows=(window,) * settings.integer("num_hidden_layers"),
        eps=("rms_norm_eps", 1e-5),
        rotary_share=1.0,
    )
    return replace(spec, projections=_PROJECTIONS)
