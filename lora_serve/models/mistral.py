"""Mistral: a dense decoder, all of whose layers have one sliding window."""

from __future__ import annotations

from lora_serve.models.dense import DenseSpec
from lora_serve.models.dense_config import read_dense
from lora_serve.models.settings import Settings

_DEFAULT_WINDOW = 4096  # where the config has no such key; null there means none


def read_mistral(settings: Settings, architecture: str) -> DenseSpec:
    """The facts of a Mistral; faults are among the findings of `settings`."""
    is_null = settings.is_null("sliding_window")
    window = None if is_null else settings.integer("sliding_window", _DEFAULT_WINDOW)
    return read_dense(
        settings,
        architecture,
        windows=(window,) * settings.integer("num_hidden_layers"),
        num_kv_heads=8,
    )
