"""Adapters as PEFT makes and saves them, on a tiny model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.model_info import Vocabulary
from lora_serve.models.base import ModelSpec, adapted_modules
from tests.fakes.tiny_models import ALL_MODELS, EXPERTS_ONE_LAYER, MIXTURES

ALL_PROJECTIONS = [
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj", "c_fc", "c_proj"),  # as some families have them
]

# Of mixtures of experts attention, and what all tokens share. A pattern, because PEFT takes
# the names of projections for those of experts, too.
NO_EXPERTS = r".*(self_attn|shared_expert|shared_mlp)\.\w+_(proj|linear)"


def make_peft(family: str, seed: int, *, seeds_biases: bool = True, **settings: Any) -> PeftModel:
    """A tiny model with an adapter whose every delta is far from 0.

    seeds_biases: whether biases of the model that PEFT trains, too, are changed.
    """
    modules = NO_EXPERTS if family in (*MIXTURES, EXPERTS_ONE_LAYER) else ALL_PROJECTIONS
    settings = {"r": 8, "lora_alpha": 16, "target_modules": modules, **settings}
    with warnings.catch_warnings():
        # peft asks transformers by a name it is about to drop, and warns of changed tied weights.
        warnings.simplefilter("ignore")
        model = get_peft_model(ALL_MODELS[family].make(), LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif parameter.requires_grad and (seeds_biases or not name.endswith("bias")):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def save_adapters(root: Path, family: str) -> list[Path]:
    """Three adapters of different ranks for the tiny model of a family."""
    paths = [root / str(seed) for seed in range(3)]
    for seed, path in enumerate(paths):
        make_peft(family, seed, r=(4, 8, 16)[seed]).save_pretrained(str(path))
    return paths


def save_adapter(model: PeftModel, directory: Path) -> None:
    with warnings.catch_warnings():  # that embeddings are saved with LoRA on them
        warnings.simplefilter("ignore", UserWarning)
        model.save_pretrained(str(directory))


def read_saved(
    model: PeftModel, directory: Path, spec: ModelSpec, vocabulary: Vocabulary | None = None
) -> AdapterCheckpoint:
    """What the server reads of the adapter when PEFT has saved it."""
    save_adapter(model, directory)
    return read_adapter(
        str(directory),
        lora_modules=adapted_modules(spec),
        max_lora_rank=64,
        vocabulary=vocabulary,
    )
