"""An adapter's tensors from a payload: base64 of torch.save(dict), or of safetensors.

The sender may be hostile, so sizes are checked against the bytes that were really sent before a
value is copied. Knows nothing of what an adapter must have: who loads the files checks that.
"""

from __future__ import annotations

import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
from safetensors import SafetensorError

from lora_serve.errors import AdapterError
from lora_serve.server.openai.stored_tensor import (
    MAX_TENSORS,
    ZIP_MAGIC,
    StoredTensor,
    read_named_tensors,
)

Tensors = Mapping[str, StoredTensor]

_FIELD = "serialized_named_tensors"
_ADVICE = "send base64 of torch.save of a dict of names and CPU tensors, or of a safetensors file"
_MAX_HEADER_BYTES = 8 * 2**20
_MAX_DIMENSIONS = 8
_SLICE_CHARS = 2**20  # a multiple of 4; other threads run between two of them
_NAMES_TOLD = 5


def read_tensors(payload: str) -> dict[str, StoredTensor]:
    """The tensors by name. Raises AdapterError for any payload that does not hold some."""
    data = _decoded(payload)
    if data.startswith(b"\x80") and not data.startswith(ZIP_MAGIC):
        raise AdapterError(
            f"`{_FIELD}` is a pickle, as SGLang's MultiprocessingSerializer writes it: it names "
            f"shared memory or CUDA IPC handles of its sender, which are not read here; {_ADVICE}",
            _FIELD,
        )
    try:
        tensors = read_named_tensors(data, _MAX_HEADER_BYTES)
        _check_sizes(tensors, len(data))
    except (ValueError, SafetensorError) as error:
        raise AdapterError(f"`{_FIELD}` cannot be read: {error}; {_ADVICE}", _FIELD) from error
    return tensors


def check_checksums(tensors: Tensors, expected: Mapping[str, str]) -> None:
    """Compare the SHA-256 of each tensor's bytes with what is expected, for all of both.

    Raises:
        AdapterError: naming the tensors that differ.
    """
    found = {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}
    faults = {
        "missing": [name for name in expected if name not in found],
        "not expected": [name for name in found if name not in expected],
        "different": [
            name for name in found if expected.get(name, found[name]).lower() != found[name]
        ],
    }
    told = [f"{len(names)} {what} ({_listed(names)})" for what, names in faults.items() if names]
    if told:
        raise AdapterError(
            f"`expected_checksums` do not fit the {len(found)} tensors that came: "
            f"{', '.join(told)}; send them again",
            "expected_checksums",
        )


def write_safetensors(tensors: Tensors, file: BinaryIO) -> None:
    header, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.num_bytes
        header[name] = {
            "dtype": tensor.safetensors_dtype,
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    encoded = json.dumps(header).encode()
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    for tensor in tensors.values():
        file.write(_bytes(tensor))


def _bytes(tensor: StoredTensor) -> memoryview:
    return tensor.values().reshape(-1).view(np.uint8).data


def _decoded(payload: str) -> bytes:
    if payload.find("=", 0, len(payload) - 2) >= 0:
        raise AdapterError(
            f"`{_FIELD}` is no base64: it has padding before its end; {_ADVICE}", _FIELD
        )
    try:
        return b"".join(
            binascii.a2b_base64(payload[begin : begin + _SLICE_CHARS], strict_mode=True)
            for begin in range(0, len(payload), _SLICE_CHARS)
        )
    except ValueError as error:
        raise AdapterError(f"`{_FIELD}` is no base64: {error}; {_ADVICE}", _FIELD) from error


def _check_sizes(tensors: Tensors, num_sent: int) -> None:
    """Raise ValueError unless each has a shape and a dtype, and all together were sent."""
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise ValueError(f"it holds {len(tensors)} tensors, 1 to {MAX_TENSORS} are taken")
    for name, tensor in tensors.items():
        shown = repr(name[:80])
        if not tensor.is_of_known_dtype:
            raise ValueError(f"{shown} is of dtype {tensor.dtype[:40]}, which adapters cannot have")
        if not 1 <= len(tensor.shape) <= _MAX_DIMENSIONS or min(tensor.shape) < 1:
            raise ValueError(f"{shown} has the shape {str(tensor.shape[:8])[:80]}")
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    if num_bytes > num_sent:
        raise ValueError(f"its tensors declare {num_bytes} bytes, {num_sent} were sent")
    for name, tensor in tensors.items():
        try:
            tensor.values()
        except ValueError as error:
            raise ValueError(f"{name[:80]!r} {error}") from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    return ", ".join(repr(name[:80]) for name in names[:_NAMES_TOLD]) + more
