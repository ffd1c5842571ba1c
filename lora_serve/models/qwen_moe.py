"""Qwen 2 and 3 with mixtures of experts, in all layers or in some.

Those of Qwen 2 have an expert that all rows take, too.
"""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.common_config import attention_bias
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.mixture_config import read_mixture, sparse_layers
from lora_serve.models.settings import Settings

_QWEN2_NUM_KV_HEADS = 16  # where the config is silent, as all below
_QWEN2_NUM_EXPERTS = 60
_QWEN2_NUM_CHOSEN = 4
_QWEN2_EXPERT_SIZE = 1408
_QWEN2_SHARED_SIZE = 5632
_QWEN3_NUM_KV_HEADS = 4
_QWEN3_HEAD_SIZE = 128
_QWEN3_NUM_EXPERTS = 128
_QWEN3_NUM_CHOSEN = 8
_QWEN3_EXPERT_SIZE = 768


def read_qwen2_moe(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Qwen 2 of experts; faults are among the findings of `settings`."""
    spec = read_dense(
        settings, architecture, windows=_no_windows(settings), num_kv_heads=_QWEN2_NUM_KV_HEADS
    )
    mixture = read_mixture(
        settings,
        sparse_layers(settings),
        num_experts=_QWEN2_NUM_EXPERTS,
        num_chosen=_QWEN2_NUM_CHOSEN,
        intermediate_size=settings.integer("moe_intermediate_size", _QWEN2_EXPERT_SIZE),
    )
    shared = settings.integer("shared_expert_intermediate_size", _QWEN2_SHARED_SIZE)
    return replace(
        spec,
        qkv_bias=settings.flag("qkv_bias", True),
        mixture=replace(mixture, shared_size=shared),
    )


def read_qwen3_moe(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Qwen 3 of experts; faults are among the findings of `settings`."""
    has_bias = attention_bias(settings)
    spec = read_dense(
        settings,
        architecture,
        windows=_no_windows(settings),
        num_kv_heads=_QWEN3_NUM_KV_HEADS,
        head_size=_QWEN3_HEAD_SIZE,
    )
    mixture = read_mixture(
        settings,
        sparse_layers(settings),
        num_experts=_QWEN3_NUM_EXPERTS,
        num_chosen=_QWEN3_NUM_CHOSEN,
        intermediate_size=settings.integer("moe_intermediate_size", _QWEN3_EXPERT_SIZE),
    )
    return replace(spec, qkv_bias=has_bias, output_bias=has_bias, qk_norm=True, mixture=mixture)


def _no_windows(settings: Settings) -> tuple[int | None, ...]:
    if settings.flag("use_sliding_window", False):
        settings.refuse("use_sliding_window is not supported with experts")
    return (None,) * settings.integer("num_hidden_layers")
