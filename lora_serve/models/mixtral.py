"""Mixtral: a Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.mixture import ExpertNames
from lora_serve.models.mixture_config import read_mixture
from lora_serve.models.settings import Settings

_NAMES = ExpertNames(
    gate="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate_proj="w1",
    up_proj="w3",
    down_proj="w2",
)
_THETA = 1e6  # where the config is silent, as the three below
_NUM_KV_HEADS = 8
_NUM_EXPERTS = 8
_NUM_CHOSEN = 2


def read_mixtral(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Mixtral; faults are among the findings of `settings`."""
    layers = range(settings.integer("num_hidden_layers"))
    has_window = settings.get("sliding_window") is not None
    window = settings.integer("sliding_window") if has_window else None
    spec = read_dense(
        settings,
        architecture,
        windows=(window,) * len(layers),
        num_kv_heads=_NUM_KV_HEADS,
        eps=("rms_norm_eps", 1e-5),
        default_theta=_THETA,
    )
    mixture = read_mixture(
        settings,
        tuple(layers),
        num_experts=_NUM_EXPERTS,
        num_chosen=_NUM_CHOSEN,
        among_chosen=True,
        intermediate_size=spec.intermediate_size,
    )
    return replace(spec, mixture=replace(mixture, names=_NAMES))
