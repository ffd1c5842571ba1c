"""Tensors as torch.save or safetensors wrote them, in bytes of a sender who may be hostile.

Nothing in them is executed or expanded: a tensor is a view of what was sent, and no value is copied
before the view is known to lie within it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from safetensors import deserialize

from lora_serve.server.openai.tensor_pickle import (
    PickledTensor,
    read_named_tensors_pickle,
    read_tensor_pickle,
)
from lora_serve.server.openai.torch_zip import stored_entries

ZIP_MAGIC = b"PK\x03\x04"
MAX_TENSORS = 2**14  # a hundred layers of seven projections have 1400
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_ENTRIES_BESIDES = 63  # torch.save writes 6 besides those of the tensors

# What safetensors and torch's storages call them, torch's dtype, and numpy's for the same bytes.
DTYPES = (
    ("F64", "torch.DoubleStorage", "float64", np.float64),
    ("F32", "torch.FloatStorage", "float32", np.float32),
    ("F16", "torch.HalfStorage", "float16", np.float16),
    ("BF16", "torch.BFloat16Storage", "bfloat16", np.int16),
)
_DTYPE_OF = MappingProxyType(
    {
        name: (safe_name, dtype, bits)
        for safe_name, other, dtype, bits in DTYPES
        for name in (safe_name, other)
    }
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of bytes that were sent.

    dtype: as the sender's format calls it. offset, strides: count values.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    data: memoryview

    @property
    def is_of_known_dtype(self) -> bool:
        return self.dtype in _DTYPE_OF

    @property
    def safetensors_dtype(self) -> str:
        """The name that safetensors has for it. Only where it is known."""
        return _DTYPE_OF[self.dtype][0]

    @property
    def torch_name(self) -> str:
        """The name that torch has for its dtype. Only where it is known."""
        return _DTYPE_OF[self.dtype][1]

    @property
    def num_bytes(self) -> int:
        """The size of its values, whether they were sent or not. Only of a known dtype."""
        return math.prod(self.shape) * np.dtype(_DTYPE_OF[self.dtype][2]).itemsize

    def values(self) -> np.ndarray:
        """The bits of its values, contiguous; a view where they were sent so. No size is below 1.

        Raises:
            ValueError: they were not sent, or not each on its own.
        """
        bits = np.dtype(_DTYPE_OF[self.dtype][2])
        strides = _strides_within(self, len(self.data) // bits.itemsize)
        values = np.ndarray(
            self.shape,
            bits,
            self.data,
            self.offset * bits.itemsize,
            [stride * bits.itemsize for stride in strides],
        )
        return np.ascontiguousarray(values)


def read_one_tensor(data: bytes, max_header_bytes: int) -> StoredTensor:
    """The tensor that was saved alone.

    Raises:
        ValueError, SafetensorError: what is wrong with the bytes.
    """
    if data.startswith(ZIP_MAGIC):
        entries, prefix = _torch_entries(data, _ENTRIES_BESIDES + 1)
        return _with_values(read_tensor_pickle(entries[f"{prefix}data.pkl"]), entries, prefix)
    tensors = _read_safetensors(data, max_header_bytes)
    if len(tensors) != 1:
        raise ValueError(f"it holds {len(tensors)} tensors, send one alone")
    return next(iter(tensors.values()))


def read_named_tensors(data: bytes, max_header_bytes: int) -> dict[str, StoredTensor]:
    """The tensors of a dict, by name.

    Raises:
        ValueError, SafetensorError: what is wrong with the bytes.
    """
    if not data.startswith(ZIP_MAGIC):
        return _read_safetensors(data, max_header_bytes)
    entries, prefix = _torch_entries(data, _ENTRIES_BESIDES + MAX_TENSORS)
    pickled = read_named_tensors_pickle(entries[f"{prefix}data.pkl"])
    return {name: _with_values(tensor, entries, prefix) for name, tensor in pickled.items()}


def _torch_entries(data: bytes, max_entries: int) -> tuple[dict[str, memoryview], str]:
    """The entries of torch's file, and what the names of those with values begin with."""
    entries = stored_entries(data, max_entries)
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("its zip file has no data.pkl, or several; torch.save writes one")
    prefix = pickles[0].removesuffix("data.pkl")
    if bytes(entries.get(prefix + "byteorder", b"little")) != b"little":
        raise ValueError("it was saved on a big-endian machine; only little-endian is accepted")
    return entries, prefix


def _with_values(
    tensor: PickledTensor, entries: Mapping[str, memoryview], prefix: str
) -> StoredTensor:
    values = entries.get(f"{prefix}data/{tensor.storage.key}")
    if values is None:
        raise ValueError("the zip entry with the tensor's values is missing")
    return StoredTensor(tensor.storage.kind, tensor.shape, tensor.strides, tensor.offset, values)


def _read_safetensors(data: bytes, max_header_bytes: int) -> dict[str, StoredTensor]:
    if data.startswith(_LEGACY_MAGIC):
        raise ValueError(
            "it is in torch's format of before 1.6; save it with torch.save(tensor, file) alone"
        )
    if int.from_bytes(data[:8], "little") > max_header_bytes or data[8:9] != b"{":
        raise ValueError("it is neither a zip file as of torch.save nor safetensors")
    tensors = deserialize(data)  # type: ignore[no-untyped-call]
    return {
        name: _dense(tensor["dtype"], tensor["shape"], tensor["data"]) for name, tensor in tensors
    }


def _dense(dtype: str, shape: list[int], data: bytes) -> StoredTensor:
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return StoredTensor(dtype, tuple(shape), strides, 0, memoryview(data))


def _strides_within(tensor: StoredTensor, num_stored: int) -> list[int]:
    """The strides, once the view is known to lie within the stored values and to repeat none."""
    num_values = math.prod(tensor.shape)
    if num_values > num_stored:
        raise ValueError(
            f"declares {num_values} values but holds {num_stored}; save tensor.contiguous()"
        )
    axes = list(zip(tensor.shape, tensor.strides, strict=True))
    strides = [stride if size > 1 else 0 for size, stride in axes]  # of size 1 it may be anything
    last = tensor.offset + sum((size - 1) * stride for size, stride in axes)
    if min(tensor.offset, *strides) < 0 or last >= num_stored:
        raise ValueError(f"reaches beyond the {num_stored} values that it holds")
    return strides
