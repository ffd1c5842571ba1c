"""Adapter versions: the given adapters, copies whose deltas are scaled, and two of other kinds.

One of these is activated; the other has biases, and changes embeddings, LM head and experts, too.

Copies of activated adapters wait for the tokens that traces write, whatever their own are.

Each lies in a directory of its own that is not written to again; `overwrite` copies a version over
an adapter's files, as a training loop does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_serve.adapters.peft_config import parse_settings
from lora_serve.errors import ConfigError
from lora_serve.model_info import Vocabulary

SCALES = (1.0, 0.5, 1.5)
ACTIVATED_SCALE, EXTENDED_SCALE = 0.75, 1.25  # none of those: no two versions are the same
MOST_TOKENS = 1000
SMALL = 0.05  # about what a trained embedding's numbers are
INVOCATION = (3,)  # the tokens that activated ones wait for: any model has this one
_TOKENS = "alora_invocation_tokens"
_NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")  # which modules have LoRA
_SIDES_B = (".lora_B.weight", ".lora_embedding_B")
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def write_versions(sources: Sequence[Path], directory: Path) -> tuple[Path, ...]:
    """A directory for each version. Raises ConfigError for a source that holds no adapter."""
    return tuple(
        _scaled_copy(source, scale, directory / f"{index}-{scale:g}")
        for index, source in enumerate(sources)
        for scale in SCALES
    )


def write_activated(source: Path, directory: Path) -> Path:
    """The source as an activated LoRA. Raises ConfigError if it holds no adapter."""
    target = _scaled_copy(source, ACTIVATED_SCALE, directory / "activated")
    config = json.loads((target / CONFIG).read_bytes())
    (target / CONFIG).write_text(json.dumps(config | {_TOKENS: INVOCATION}))
    return target


def write_extended(
    source: Path,
    vocabulary: Vocabulary,
    experts: Mapping[str, tuple[int, int]],
    directory: Path,
) -> Path:
    """The source with biases, with other rows of some tokens in embeddings and LM head.

    And, where it has none, with LoRA on all `experts`: (out_features, in_features) of each
    projection of each.
    Raises ConfigError if it holds no adapter.
    """
    import numpy as np  # slow to import; not for --help
    from safetensors.numpy import load_file, save_file

    target = _scaled_copy(source, EXTENDED_SCALE, directory / "extended")
    rng, tensors, token_ids = np.random.default_rng(0), load_file(target / WEIGHTS), {}

    def small(*shape: int) -> np.ndarray:
        return (SMALL * rng.standard_normal(shape)).astype(np.float32)

    for name in [name for name in tensors if name.endswith(".lora_B.weight")]:
        if ".experts." in name:  # which PEFT gives none
            continue
        tensors[f"{name.removesuffix('weight')}bias"] = small(len(tensors[name]))
    for matrix, step in ((vocabulary.embedding, 3), (vocabulary.head, 4)):
        ids = token_ids[matrix] = list(range(0, vocabulary.size, step))[:MOST_TOKENS]
        name = f"base_model.model.{matrix}.token_adapter.trainable_tokens_delta"
        tensors[name] = small(len(ids), vocabulary.hidden_size)
    config = json.loads((target / CONFIG).read_bytes())
    settings = parse_settings(config, [])
    if any(".experts." in name for name in tensors):
        experts = {}
    for name, (out_features, in_features) in experts.items():
        rank = settings.rank_of(name)
        for side, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = small(*shape)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    config |= {_TOKENS: None, "lora_bias": True, "trainable_token_indices": token_ids}
    config |= {"target_modules": ".*", **dict.fromkeys(_NARROWING)}
    (target / CONFIG).write_text(json.dumps(config))
    return target


def overwrite(target: Path, version: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for source in version.iterdir():
        staged = target / f"{source.name}.new"
        shutil.copyfile(source, staged)
        os.replace(staged, target / source.name)


def _scaled_copy(source: Path, scale: float, target: Path) -> Path:
    from safetensors import SafetensorError  # with torch, slow to import; not for --help
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True)
    try:
        tensors = load_file(source / WEIGHTS)
        config = dict(json.loads((source / CONFIG).read_bytes()))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ConfigError(f"--adapters {source}: no adapter can be read there: {error}") from error
    scaled = {
        name: tensor * scale if name.endswith(_SIDES_B) else tensor
        for name, tensor in tensors.items()
    }
    save_file(scaled, target / WEIGHTS, metadata={"format": "pt"})
    if config.get(_TOKENS):
        config[_TOKENS] = INVOCATION
    (target / CONFIG).write_text(json.dumps(config))
    return target
