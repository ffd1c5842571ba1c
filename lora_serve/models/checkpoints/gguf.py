"""GGUF: llama.cpp's files, one of which is a model with its tokenizer.

Quantised tensors are dequantised as they are read, a few rows at a time: exactly as the format
defines them, in float32. Nothing of a file is executed.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.gguf.header import MAGIC, TensorEntry, read_header
from lora_serve.gguf.types import TENSOR_TYPES
from lora_serve.models.checkpoints.base import StoredTensor
from lora_serve.models.checkpoints.ggml_blocks import DEQUANTIZERS, Bytes, Floats
from lora_serve.models.checkpoints.gguf_config import ROPE_FREQS, config_of
from lora_serve.models.checkpoints.gguf_families import FAMILIES
from lora_serve.models.readahead import FileRange

VALUES_AT_ONCE = 1 << 16  # temporaries stay in a core's cache; 1 << 20 took twice the time
_FLOATS: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_TYPES = {each.name: each for each in TENSOR_TYPES.values()}


class Gguf:
    name = "GGUF"
    files = ()  # of the hub's repositories a file is fetched by its name alone
    dtypes = (*_FLOATS, *DEQUANTIZERS)

    def recognises(self, directory: Path) -> bool:
        """Whether it is one file, and of this format."""
        try:
            with directory.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except OSError:
            return False

    def config(self, directory: Path) -> Mapping[str, object]:
        return config_of(read_header(directory), self.dtypes)

    def open(self, directory: Path) -> OpenGguf:
        return OpenGguf(directory)


class OpenGguf:
    """An open file. Tensors have the names, the shapes and the rows of the family's own.

    Raises:
        ConfigError: the file is broken, or of a family that is not known.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        weakref.finalize(self, os.close, self._descriptor)
        with open(self._descriptor, "rb", closefd=False) as file:
            header = read_header(path, file)
        config = config_of(header, Gguf.dtypes)
        self.family = FAMILIES[str(header.metadata["general.architecture"])]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", heads)
        assert isinstance(heads, int)
        assert isinstance(kv_heads, int)
        self._heads = (heads, kv_heads)
        self._entries = {
            self.family.tensor_name(stored): entry
            for stored, entry in header.tensors.items()
            if stored != ROPE_FREQS
        }

    def tensors(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(
                entry.shape,
                entry.type_name,
                entry.type_name in Gguf.dtypes,
                (FileRange(self._path, entry.begin, entry.end),),
            )
            for name, entry in self._entries.items()
        }

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        dtype = _FLOATS.get(entry.type_name)
        if dtype is None:
            tensor = self._dequantized(entry, DEQUANTIZERS[entry.type_name])
        else:
            tensor = torch.empty(entry.shape, dtype=dtype)
            self._fill(entry.begin, tensor.view(-1).view(torch.uint8).numpy())
        return self.family.restored(name, tensor, *self._heads)

    def _dequantized(self, entry: TensorEntry, dequantize: Callable[[Bytes], Floats]) -> Tensor:
        block = _TYPES[entry.type_name]
        values = np.empty((math.prod(entry.shape) // block.values, block.values), dtype=np.float32)
        at_once = max(1, VALUES_AT_ONCE // block.values)
        raw = np.empty((min(at_once, len(values)), block.num_bytes), dtype=np.uint8)
        for begin in range(0, len(values), at_once):
            part = values[begin : begin + at_once]
            blocks = raw[: len(part)]
            self._fill(entry.begin + begin * block.num_bytes, blocks.reshape(-1))
            with np.errstate(invalid="ignore"):  # a file may hold infinities and NaNs
                part[:] = dequantize(blocks)
        return torch.from_numpy(values.reshape(entry.shape))

    def _fill(self, begin: int, buffer: Bytes) -> None:
        """The file's bytes from `begin` on, as many as there is room for."""
        try:
            num_read = os.preadv(self._descriptor, [buffer.data], begin)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error
        if num_read == 0 and len(buffer):
            raise ConfigError(f"{self._path} became shorter while it was read")
        if num_read < len(buffer):  # the system reads 2 GiB at a time
            self._fill(begin + num_read, buffer[num_read:])


FORMAT = Gguf()
