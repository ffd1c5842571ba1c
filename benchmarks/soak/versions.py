"""Adapter versions on disk: the demo's two adapters, and scaled copies of them.

Equal bytes are one version, wherever they lie; a version is known by its digest's first digits,
as `system_fingerprint` shows them.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file, save_file

from lora_serve.demo.model import DemoPaths

SCALES = (1.0, 0.5, 0.75, 1.25)
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Version:
    """digest: its first twelve hex digits; the base model's is empty, and so is its path."""

    digest: str
    path: Path | None


def write_versions(demo: DemoPaths, directory: Path) -> list[Path]:
    """One directory for each."""
    paths = []
    for source in (demo.alpha, demo.beta):
        for scale in SCALES:
            target = directory / f"{source.name}-{scale:g}"
            shutil.copytree(source, target)
            tensors = load_file(source / WEIGHTS)
            scaled = {
                name: tensor * tensor.dtype.type(scale) if ".lora_B." in name else tensor
                for name, tensor in tensors.items()
            }
            save_file(scaled, target / WEIGHTS, metadata={"format": "pt"})
            paths.append(target)
    return paths


def overwrite(target: Path, version: Path) -> None:
    """Put another version's bytes where an adapter lies, as a training loop does."""
    target.mkdir(exist_ok=True)
    for source in version.iterdir():
        staged = target / f"{source.name}.new"
        shutil.copyfile(source, staged)
        os.replace(staged, target / source.name)
