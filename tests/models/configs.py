"""A small config.json, and what is read of it with changes."""

from __future__ import annotations

from typing import Any

from lora_serve.models.dense import DenseSpec
from lora_serve.models.registry import read_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def read(**changes: Any) -> DenseSpec:
    """LLAMA with changes; None takes a key away."""
    spec = read_spec(
        {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}, "c.json"
    )
    assert isinstance(spec, DenseSpec)
    return spec
