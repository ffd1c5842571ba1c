"""Adapters made up for a model: random numbers, which teach it nothing and change its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

RANK = 8
# The inputs and outputs of linear layers, by their names in the model.
Projections = Mapping[str, tuple[int, int]]


def write_random_adapter(
    directory: Path, projections: Projections, base: str, seed: int, gain: float
) -> None:
    """Write a PEFT checkpoint.

    Args:
        directory: where it shall lie; it is made if it is not there.
        projections: what it changes.
        base: what its config names as its base model.
        seed: equal seeds give equal numbers.
        gain: how large the delta of a layer's output is, where the output itself is about 1.
    """
    import numpy as np  # slow to import; not for --help
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (inputs, outputs) in projections.items():
        down = rng.standard_normal((RANK, inputs)) / np.sqrt(inputs)
        up = rng.standard_normal((outputs, RANK)) * gain / np.sqrt(RANK)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.astype(np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.astype(np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in projections}),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
