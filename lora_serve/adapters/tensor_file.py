"""Reads a safetensors file once, into a buffer of our own. Knows nothing of adapters.

A file's header is checked in full before memory is allocated for what it claims to hold. The file
may change at any time: only what was read into the buffer counts, and nothing is mapped.

    8 bytes: length N of the header, little-endian · N bytes: JSON · the rest: the tensors' bytes
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lora_serve.adapter_checkpoint import RawTensor
from lora_serve.adapters.findings import listed, shown
from lora_serve.adapters.strict_json import parse_object

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 8 * 2**20  # a hundred layers of seven projections need a third of a MiB
_MAX_DIMENSIONS = 8

# Item size, the type to view the bits as, and the bits of the exponent: all set in inf and NaN.
_FLOATS: dict[str, tuple[int, str, int]] = {
    "F32": (4, "<u4", 0x7F800000),
    "F16": (2, "<u2", 0x7C00),
    "BF16": (2, "<u2", 0x7F80),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the header says of one tensor: its bytes are [begin, end) of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """An open safetensors file: first its header, then, once, its tensors."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._status = os.fstat(file.fileno())

    def read_header(self, findings: list[str]) -> dict[str, TensorSpec] | None:
        """What tensors there are by name, or None and findings."""
        size = self._status.st_size
        length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
        num_data_bytes = size - _LENGTH_BYTES - length
        if num_data_bytes < 0:
            findings.append(
                f"the safetensors file is truncated or none: {size} bytes, which do not hold the "
                "header that they announce; copy it again"
            )
            return None
        if length > _MAX_HEADER_BYTES:
            findings.append(
                f"the safetensors file has a header of more than {_MAX_HEADER_BYTES} bytes, the "
                "most of an adapter; save it without metadata, or with fewer tensors"
            )
            return None
        header = parse_object(self._file.read(length), "the safetensors header", findings)
        if header is None:
            return None
        header.pop("__metadata__", None)
        specs = {name: _parse_spec(name, entry, findings) for name, entry in header.items()}
        complete = {name: spec for name, spec in specs.items() if spec is not None}
        if len(complete) < len(specs) or not _lie_side_by_side(complete, num_data_bytes, findings):
            return None
        return complete

    def read_tensors(
        self, specs: Mapping[str, TensorSpec], findings: list[str]
    ) -> dict[str, RawTensor]:
        """The tensors that `read_header` found, as read-only views of one new buffer."""
        buffer = bytearray(max(spec.end for spec in specs.values()))
        num_read = self._file.readinto(buffer)  # type: ignore[attr-defined]  # open("rb") has it
        if num_read < len(buffer) or self._has_changed():
            findings.append(
                "the safetensors file was written to while it was read; load it again when it is "
                "complete"
            )
        data = memoryview(buffer)
        tensors = {
            name: RawTensor(spec.dtype, spec.shape, data[spec.begin : spec.end].toreadonly())
            for name, spec in specs.items()
        }
        broken = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
        if broken:
            findings.append(f"infinite or NaN values in {listed(broken)}; training has diverged")
        return tensors

    def _has_changed(self) -> bool:
        now = os.fstat(self._file.fileno())
        before = self._status
        return (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)


def _parse_spec(name: str, entry: object, findings: list[str]) -> TensorSpec | None:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end], **rest} if (
            not rest
            and len(shape) <= _MAX_DIMENSIONS
            and all(_is_size(number) for number in (*shape, begin, end))
        ):
            spec = TensorSpec(dtype, tuple(shape), begin, end)
        case _:
            findings.append(f"tensor {shown(name)} is described as {shown(entry)}")
            return None
    if dtype not in _FLOATS:
        findings.append(
            f"tensor {shown(name)} has dtype {shown(dtype)}; save it as one of {', '.join(_FLOATS)}"
        )
        return None
    if end - begin != math.prod(shape) * _FLOATS[dtype][0]:
        findings.append(
            f"tensor {shown(name)} of shape {shown(spec.shape)} and dtype {dtype} cannot have "
            f"{shown(end - begin)} bytes"
        )
        return None
    return spec


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _lie_side_by_side(
    specs: Mapping[str, TensorSpec], num_data_bytes: int, findings: list[str]
) -> bool:
    """The tensors' bytes must follow one another without gap or overlap, up to the file's end."""
    expected = 0
    for name, spec in sorted(specs.items(), key=lambda item: (item[1].begin, item[1].end)):
        if spec.begin != expected:
            findings.append(
                f"tensor {shown(name)} begins at byte {spec.begin} of the data, not at {expected}: "
                "the file has overlaps or gaps"
            )
            return False
        expected = spec.end
    if expected != num_data_bytes:
        findings.append(
            f"the safetensors file is truncated or too long: its header describes {expected} bytes "
            f"of tensors, it holds {num_data_bytes}"
        )
    return expected == num_data_bytes


def bits_of(tensor: RawTensor) -> npt.NDArray[np.unsignedinteger]:
    """Its values in their order, as the whole numbers that have their bits."""
    return np.frombuffer(tensor.data, dtype=_FLOATS[tensor.dtype][1])


def _is_finite(tensor: RawTensor) -> bool:
    exponent, bits = _FLOATS[tensor.dtype][2], bits_of(tensor)
    return not bool(((bits & exponent) == exponent).any())
