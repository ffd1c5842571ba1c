"""GGUF: llama.cpp's files, one of which is a model with its tokenizer.

Quantised tensors are dequantised as they are read, exactly as the format defines them, in float32
before they are rounded; or given as the codes that they are. Both some blocks at a time, in native
code. Nothing of a file is executed.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.gguf.header import MAGIC, TensorEntry, read_header
from lora_serve.gguf.types import TENSOR_TYPES
from lora_serve.models.checkpoints.base import StoredTensor
from lora_serve.models.checkpoints.ggml_blocks import BLOCK_TYPES
from lora_serve.models.checkpoints.gguf_config import ROPE_TENSORS, config_of
from lora_serve.models.checkpoints.gguf_families import family_of
from lora_serve.models.readahead import FileRange
from lora_serve.ops.cpu.ggml_blocks import DEQUANTIZED, Bytes, NativeBlocks
from lora_serve.ops.cpu.memory import WeightMemory
from lora_serve.ops.quantization import QuantizedWeight

VALUES_AT_ONCE = 1 << 22  # of 2 to 4 MB, which all threads share
_FLOATS: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_TYPES = {each.name: each for each in TENSOR_TYPES.values()}


class Gguf:
    name = "GGUF"
    files = ()  # of the hub's repositories a file is fetched by its name alone
    dtypes = (*_FLOATS, *BLOCK_TYPES)

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
        family = family_of(header.metadata)
        assert family is not None, "config_of knows the family"
        self._family = family
        heads = config["num_attention_heads"]
        kv_heads, experts = config.get("num_key_value_heads", heads), config.get("num_experts", 0)
        assert isinstance(heads, int)
        assert isinstance(kv_heads, int)
        assert isinstance(experts, int)
        self._heads = (heads, kv_heads)
        self._memory = WeightMemory()
        self._entries = {
            name: part
            for stored, entry in header.tensors.items()
            if stored not in ROPE_TENSORS
            for name, part in family.parts(stored, entry, experts)
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

    def read(self, name: str, wanted: torch.dtype = torch.float32) -> Tensor:
        entry = self._entries[name]
        dtype = _FLOATS.get(entry.type_name)
        if dtype is None:
            # Norms, which are no matrices, may be computed with before they are rounded.
            is_rounded = wanted in DEQUANTIZED and len(entry.shape) > 1
            tensor = self._dequantized(entry, wanted if is_rounded else torch.float32)
        else:
            tensor = self._memory.take(entry.shape, dtype)
            self._fill(entry.begin, tensor.view(-1).view(torch.uint8).numpy())
        return self._family.restored(name, tensor, *self._heads)

    def read_codes(self, name: str) -> QuantizedWeight | None:
        entry = self._entries[name]
        block_type = BLOCK_TYPES.get(entry.type_name)
        if block_type is None or len(entry.shape) != 2:
            return None
        form, (rows, width) = block_type.form, entry.shape
        take, of_groups = self._memory.take, (rows, width // form.group)
        codes, scales = take(entry.shape, torch.int8), take(of_groups, torch.float32)
        offsets = take(of_groups, torch.float32) if block_type.has_offsets else None
        for begin, blocks in self._blocks(entry):
            groups = begin // form.group
            self._native.unpack(
                entry.type_name,
                blocks,
                codes.view(-1)[begin:],
                scales.view(-1)[groups:],
                None if offsets is None else offsets.view(-1)[groups:],
            )
        weight = QuantizedWeight(form, codes, scales, offsets)
        return weight.with_rows(lambda part: self._family.restored(name, part, *self._heads))

    def _dequantized(self, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
        values = self._memory.take(entry.shape, dtype)
        for begin, blocks in self._blocks(entry):
            self._native.dequantize(entry.type_name, blocks, values.view(-1)[begin:])
        return values

    @cached_property
    def _native(self) -> NativeBlocks:
        return NativeBlocks()

    def _blocks(self, entry: TensorEntry) -> Iterator[tuple[int, Bytes]]:
        """(N, bytes of a block), some at a time, in memory that the next ones overwrite.

        With each the number of values before them.
        """
        block = _TYPES[entry.type_name]
        num_blocks = math.prod(entry.shape) // block.values
        at_once = max(1, VALUES_AT_ONCE // block.values)
        shape = min(at_once, num_blocks), block.num_bytes
        raw: Bytes = self._memory.take(shape, torch.uint8).numpy()
        for begin in range(0, num_blocks, at_once):
            blocks = raw[: num_blocks - begin]
            self._fill(entry.begin + begin * block.num_bytes, blocks.reshape(-1))
            yield begin * block.values, blocks

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
