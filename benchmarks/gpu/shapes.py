"""The model shapes that are measured, as configs that an engine can load with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.make_checkpoint import QWEN_0_5B, QWEN_3B, ModelShape

# Of Qwen2.5, whose names they carry.
SHAPES: Mapping[str, ModelShape] = {
    "0.5B": QWEN_0_5B,
    "3B": QWEN_3B,
    "7B": ModelShape(
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=152_064,
    ),
    # For trying the scripts out where there is no card; no server has it.
    "tiny": ModelShape(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        max_position_embeddings=4096,
    ),
}


def is_tied(name: str) -> bool:
    return name != "7B"


def model_config(name: str) -> dict[str, object]:
    """What config.json says of a shape."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **asdict(SHAPES[name]),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": is_tied(name),
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    }


def write_config(name: str, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(name), indent=2))
    return directory
