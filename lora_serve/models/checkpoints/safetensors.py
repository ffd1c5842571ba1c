"""safetensors: one file, or shards with an index, as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.models.checkpoints.base import FLOATS, StoredTensor
from lora_serve.models.checkpoints.config_json import quantization_method, read_config_json
from lora_serve.models.readahead import FileRange
from lora_serve.ops.cpu.memory import WeightMemory
from lora_serve.ops.quantization import QuantizedWeight
from lora_serve.regular_file import read_regular

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # as safetensors itself has it
MAX_INDEX_BYTES = 64 * 2**20  # a line for each tensor
# Kimi K2's experts are 207,000 with 4 bits, and a hundred thousand take a second of a start.
MAX_TENSORS = 2**19


class Safetensors:
    name = "safetensors"
    files = ("*.safetensors",)
    dtypes = FLOATS

    def recognises(self, directory: Path) -> bool:
        has_files = (directory / INDEX).is_file() or (directory / SINGLE).is_file()
        return has_files and quantization_method(directory) is None

    def config(self, directory: Path) -> Mapping[str, object]:
        return read_config_json(directory)

    def open(self, directory: Path) -> OpenSafetensors:
        return OpenSafetensors(_files_of(directory))


class OpenSafetensors:
    """The open files, and which of them has each tensor."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, safe_open] = {}
        self._memory = WeightMemory()
        for path in paths:
            file = _open(path)  # which checks its header
            names = file.keys()
            if len(self._files) + len(names) > MAX_TENSORS:
                raise ConfigError(
                    f"{path.parent} has more than {MAX_TENSORS:,} tensors, with the {len(names):,} "
                    f"of {path.name}; no model has so many: download the checkpoint again"
                )
            self._files |= dict.fromkeys(names, file)
        self._ranges = {k: v for path in paths for k, v in tensor_ranges(path).items()}

    def tensors(self) -> dict[str, StoredTensor]:
        return {name: self._stored(name) for name in self._files}

    def read(self, name: str, wanted: torch.dtype = torch.float32) -> Tensor:
        mapped: Tensor = self._files[name].get_tensor(name)  # a part of the file
        return self._memory.take(mapped.shape, mapped.dtype).copy_(mapped)

    def read_codes(self, name: str) -> QuantizedWeight | None:
        return None

    def _stored(self, name: str) -> StoredTensor:
        header = self._files[name].get_slice(name)
        dtype = header.get_dtype()
        found = self._ranges.get(name)
        ranges = () if found is None else (found,)
        return StoredTensor(tuple(header.get_shape()), dtype, dtype in Safetensors.dtypes, ranges)


FORMAT = Safetensors()


def tensor_ranges(path: Path) -> dict[str, FileRange]:
    """Where each tensor of a safetensors file lies; empty if its header cannot be read."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > MAX_HEADER_BYTES:
                return {}
            header = json.loads(file.read(header_bytes))
        return {
            name: FileRange(path, *(8 + header_bytes + offset for offset in entry["data_offsets"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _files_of(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            content = json.loads(read_regular(index, MAX_INDEX_BYTES))
            names = sorted(set(content["weight_map"].values()))
            paths = [directory / name for name in names]
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(f"{index}: not an index of safetensors files: {error!r}") from error
        elsewhere = [name for name in names if Path(name).name != name or name == ".."]
        if elsewhere:
            raise ConfigError(
                f"{index} names {elsewhere[0][:80]!r}; name files that lie beside it alone"
            )
    elif (directory / SINGLE).is_file():
        paths = [directory / SINGLE]
    else:
        raise ConfigError(_no_weights(directory))
    return paths


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; download the checkpoint again") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path} is broken: {error}; download it again") from error


def _no_weights(directory: Path) -> str:
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    if not pickles:
        return f"{directory} holds no model.safetensors, nor an index of its shards"
    return (
        f"{directory} holds {pickles[0]} but no safetensors; pickled weights are not loaded "
        "because they may run code. Convert them once: AutoModelForCausalLM.from_pretrained(path)"
        ".save_pretrained(new_path, safe_serialization=True)"
    )
