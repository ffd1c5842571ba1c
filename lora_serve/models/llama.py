"""Llama: a dense decoder, with a bias in its attention if the config asks for one."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.models.common_config import attention_bias
from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings


def read_llama(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Llama; faults are among the findings of `settings`."""
    has_bias = attention_bias(settings)
    windows = (None,) * settings.integer("num_hidden_layers")
    spec = read_dense(settings, architecture, windows=windows)
    return replace(spec, qkv_bias=has_bias, output_bias=has_bias)
