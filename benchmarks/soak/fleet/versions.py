"""Adapters of other bytes each, as many as are asked for, and the digests that they have."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.check.adapters import ModelShape, write_adapter
from lora_serve.demo.random_adapters import RANK

GAIN = 0.5
SHORT = 12  # digits of a digest that an answer names


@dataclass(frozen=True, slots=True)
class Version:
    """digest: as an answer names it."""

    digest: str
    path: Path


@dataclass(slots=True)
class Versions:
    """Each lies in a directory of its own that is not written to again."""

    model: Path
    directory: Path
    _shape: ModelShape = field(init=False)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._shape = ModelShape.read(self.model)

    def new(self) -> Version:
        """One that no name has stood for."""
        number = next(self._numbers)
        path = self.directory / f"version-{number}"
        write_adapter(path, self._shape, str(self.model), number, GAIN)
        projections = self._shape.projections()
        modules = {name: (outputs, inputs) for name, (inputs, outputs) in projections.items()}
        checkpoint = read_adapter(str(path), lora_modules=modules, max_lora_rank=RANK)
        return Version(checkpoint.digest.hex()[:SHORT], path)
