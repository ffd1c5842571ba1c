"""The door for checkpoint formats: what a format is to the rest of the engine.

A format finds a model's config and its tensors, by the names under which they are stored. Which
tensors a model has, what they are called in the engine, and that all are there, is not its concern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.models.readahead import FileRange
from lora_serve.ops.quantization import QuantizedWeight

FLOATS = ("F32", "F16", "BF16")  # the dtypes of weights that are not quantised
MOST_FINDINGS = 8  # named in an error; a wrong checkpoint has hundreds


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as `StoredTensors.read` gives it.

    dtype: as the format names it. is_readable: whether `read` can give it as floats. ranges: where
    its bytes lie, to be asked of the system ahead; empty if that is not known.
    """

    shape: tuple[int, ...]
    dtype: str
    is_readable: bool
    ranges: tuple[FileRange, ...] = ()


class StoredTensors(Protocol):
    """The tensors of one checkpoint, whose files are open."""

    def tensors(self) -> Mapping[str, StoredTensor]:
        """All of them, by the names under which they are stored. No tensor is read for it."""

    def read(self, name: str, wanted: torch.dtype = torch.float32) -> Tensor:
        """A tensor of any float dtype on the CPU, in memory of its own.

        wanted: what the caller will make of it; floats that are computed may be rounded to it.
        """

    def read_codes(self, name: str) -> QuantizedWeight | None:
        """A matrix as the codes that it is stored as, where `PackCodes` could take them.

        None for floats, and for codes of another kind, which `read` dequantises.
        """


class CheckpointFormat(Protocol):
    """A format. It refuses with a ConfigError that names the file and the remedy.

    directory: where a checkpoint lies; of a format that has one file, that file.
    """

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def files(self) -> tuple[str, ...]:
        """Patterns of its files' names besides *.json: what is fetched from the hub."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that it can read, for the error about others."""

    def recognises(self, directory: Path) -> bool:
        """Whether --load-format auto takes it for this directory. At most one format does."""

    def config(self, directory: Path) -> Mapping[str, object]:
        """The model's config.json, without settings that describe this format alone.

        What remains of `quantization_config` is refused as unknown.
        """

    def open(self, directory: Path) -> StoredTensors:
        """Open its files. Only headers are read, and tensors of a few bytes that say a shape."""


def refuse_all(checkpoint: Path, findings: Sequence[str]) -> None:
    """Raise a ConfigError that tells the first findings about a checkpoint, if there are any."""
    if findings:
        more = f"; and {len(findings) - MOST_FINDINGS} more" * (len(findings) > MOST_FINDINGS)
        raise ConfigError(f"{checkpoint}: {'; '.join(findings[:MOST_FINDINGS])}{more}")
