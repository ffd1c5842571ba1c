"""Reads the header of a GGUF file: its metadata, and where each tensor lies.

The file is another program's, maybe an attacker's: each size in it is compared with the bytes that
are left before memory is taken for it, and each tensor must lie within the file. Knows no model.

Source: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np

from lora_serve.errors import ConfigError
from lora_serve.file_identity import file_identity
from lora_serve.gguf.types import TENSOR_TYPES

MAGIC, VERSIONS = b"GGUF", (2, 3)
# The largest vocabularies take 20 MB.
MAX_HEADER_BYTES = 128 * 2**20
# Of all lists together. A byte of a file may be a value of 36 bytes here; the largest vocabularies,
# with kinds, scores and merges, have 2 million.
MAX_LISTED = 2**23
MAX_TENSORS = 2**16  # the experts of a layer are one; the largest models have 2,000
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65_535  # of metadata keys, as the format's document bounds them
DEFAULT_ALIGNMENT = 32

_NUMBERS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
)
_BOOLEAN, _STRING, _ARRAY = 7, 8, 9
_LENGTH_BYTES = 8

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file's bytes [begin, end).

    shape: rows first, as in numpy; the file has it the other way round. type_name: one that
    TENSOR_TYPES has.
    """

    shape: tuple[int, ...]
    type_name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]


_last: tuple[tuple[object, ...], GgufHeader] | None = None


class _Broken(Exception):
    """What is wrong with the file, in words."""


def read_header(path: Path, file: BinaryIO | None = None) -> GgufHeader:
    """The header of a GGUF file.

    Args:
        path: the file's, for errors, and to open it.
        file: the file, if it is open already; it is read from its beginning.

    Raises:
        ConfigError: it cannot be read, is no GGUF file, or is broken.
    """
    try:
        if file is not None:
            return _remembered(path, file)
        with path.open("rb") as opened:
            return _remembered(path, opened)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except _Broken as error:
        raise ConfigError(f"{path}: {error}") from error


def forget_header() -> None:
    """Give back the memory of the header that was read last: a vocabulary takes 50 MB."""
    global _last
    _last = None


def _remembered(path: Path, file: BinaryIO) -> GgufHeader:
    """The header, which a start asks for several times; from memory if the file is the same."""
    global _last
    found = file_identity(os.fstat(file.fileno()))
    if found is None:
        return _read(path, file)
    identity, last = (path, *found), _last
    if last is not None and last[0] == identity:
        return last[1]
    header = _read(path, file)
    _last = (identity, header)
    return header


def _read(path: Path, file: BinaryIO) -> GgufHeader:
    num_bytes = file.seek(0, 2)
    file.seek(0)
    reader = _Reader(file, min(num_bytes, MAX_HEADER_BYTES), num_bytes > MAX_HEADER_BYTES)
    _check_version(reader)
    num_tensors, num_values = reader.number("<Q"), reader.number("<Q")
    metadata: dict[str, Value] = {}
    for _ in range(reader.count(num_values, _LENGTH_BYTES + 5, "metadata values")):
        key = reader.string(MAX_NAME_BYTES)
        if key in metadata:
            raise _Broken(f"the metadata has {key[:80]!r} twice")
        metadata[key] = reader.value(reader.number("<I"), key)
    if reader.count(num_tensors, _LENGTH_BYTES + 16, "tensors") > MAX_TENSORS:
        raise _Broken(
            f"the header has {num_tensors:,} tensors, above the {MAX_TENSORS:,} of any model"
        )
    entries = [reader.tensor() for _ in range(num_tensors)]
    alignment = _alignment(metadata)
    begin = -(-reader.position // alignment) * alignment
    return GgufHeader(path, metadata, _placed(entries, begin, alignment, num_bytes))


def _check_version(reader: _Reader) -> None:
    magic = reader.take(4) if reader.left >= 4 else b""
    if magic != MAGIC:
        raise _Broken(f"this is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    version = reader.number("<I")
    if version in VERSIONS:
        return
    if version & 0xFFFF == 0:
        raise _Broken("the file is in big-endian order; convert it for this machine's order")
    raise _Broken(
        f"GGUF version {version} is not supported, {' and '.join(map(str, VERSIONS))} are; convert "
        "the model again with a llama.cpp that writes one of these"
    )


def _alignment(metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Broken(f"general.alignment must be a power of two, is {alignment!r}")
    return alignment


def _placed(
    entries: list[tuple[str, tuple[int, ...], int, int]],
    begin: int,
    alignment: int,
    file_bytes: int,
) -> dict[str, TensorEntry]:
    """The tensors by name, each checked to lie within the file, and on no other's bytes."""
    placed: dict[str, TensorEntry] = {}
    for name, shape, type_id, offset in entries:
        shown = repr(name[:80])
        if name in placed:
            raise _Broken(f"the tensor {shown} is there twice")
        tensor_type = TENSOR_TYPES.get(type_id)
        if tensor_type is None:
            raise _Broken(
                f"the tensor {shown} has the type {type_id}, which is not known here; it may be of "
                "a later llama.cpp: take a file of another quantisation"
            )
        if not shape or 0 in shape or shape[-1] % tensor_type.values:
            raise _Broken(
                f"the tensor {shown} of shape {shape} cannot be {tensor_type.name}, whose blocks "
                f"have {tensor_type.values} values"
            )
        if offset % alignment:
            raise _Broken(
                f"the tensor {shown} lies at {offset:,}, not a multiple of {alignment}; the header "
                "is broken, download the file again"
            )
        first = begin + offset
        end = first + math.prod(shape) // tensor_type.values * tensor_type.num_bytes
        if end > file_bytes:
            raise _Broken(
                f"the tensor {shown} ends at byte {end:,} of a file of {file_bytes:,} bytes; the "
                "file is cut off, download it again"
            )
        placed[name] = TensorEntry(shape, tensor_type.name, first, end)
    in_order = sorted(placed.items(), key=_begin_of)
    for (before, one), (name, other) in pairwise(in_order):
        if other.begin < one.end:
            raise _Broken(
                f"the tensors {before[:80]!r} and {name[:80]!r} have bytes in common; the header "
                "is broken, download the file again"
            )
    return placed


def _begin_of(item: tuple[str, TensorEntry]) -> int:
    return item[1].begin


class _Reader:
    """Reads the fields of a header one by one, never beyond `limit` bytes.

    is_bounded: whether the file goes on there.
    """

    def __init__(self, file: BinaryIO, limit: int, is_bounded: bool) -> None:
        self._file = file
        self._limit = limit
        self._is_bounded = is_bounded
        self.position = 0
        self._num_listed = 0

    @property
    def left(self) -> int:
        return self._limit - self.position

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.left:
            raise _Broken(self._told(f"{num_bytes:,} bytes"))
        taken = self._file.read(num_bytes)
        if len(taken) < num_bytes:
            raise _Broken("the file became shorter while it was read")
        self.position += num_bytes
        return taken

    def count(self, number: int, least_bytes: int, what: str) -> int:
        """`number`, if so many things of at least so many bytes can follow."""
        if number * least_bytes > self.left:
            raise _Broken(self._told(f"{number:,} {what}"))
        return number

    def _count_listed(self, number: int, least_bytes: int, what: str) -> int:
        """Count the items of one more list."""
        self.count(number, least_bytes, what)
        self._num_listed += number
        if self._num_listed > MAX_LISTED:
            raise _Broken(
                f"with {number:,} {what} its lists have {self._num_listed:,} items, above the "
                f"{MAX_LISTED:,} of any model"
            )
        return number

    def number(self, code: str) -> int:
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self, most_bytes: int | None = None) -> str:
        length = self.number("<Q")
        if most_bytes is not None and length > most_bytes:
            raise _Broken(f"a name of {length:,} bytes is above the {most_bytes:,} of the format")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise _Broken(f"a text before byte {self.position:,} is not UTF-8: {error}") from error

    def value(self, kind: int, key: str) -> Value:
        if kind != _ARRAY:
            return self._scalar_reader(kind, key)()
        item_kind, length = self.number("<I"), self.number("<Q")
        if item_kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[item_kind])
            self._count_listed(length, dtype.itemsize, f"values of {key[:80]!r}")
            values: list[Scalar] = np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
            return values
        if item_kind == _STRING:
            return self._strings(
                self._count_listed(length, _LENGTH_BYTES, f"texts of {key[:80]!r}")
            )
        item = self._scalar_reader(item_kind, key)
        return [item() for _ in range(self._count_listed(length, 1, f"values of {key[:80]!r}"))]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the type, and offset behind the header."""
        name, num_dimensions = self.string(MAX_NAME_BYTES), self.number("<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise _Broken(f"the tensor {name[:80]!r} has {num_dimensions} dimensions")
        sizes = [self.number("<Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(sizes)), self.number("<I"), self.number("<Q")

    def _strings(self, length: int) -> list[Scalar]:
        """Read what `string` reads, without its calls: vocabularies have a quarter million."""
        read, unpack = self._file.read, struct.Struct("<Q").unpack
        position, limit, texts = self.position, self._limit, list[Scalar]()
        for _ in range(length):
            head = read(_LENGTH_BYTES)
            num_bytes = unpack(head)[0] if len(head) == _LENGTH_BYTES else limit
            position += _LENGTH_BYTES + num_bytes
            if position > limit:
                raise _Broken(self._told(f"a text of {num_bytes:,} bytes"))
            try:
                texts.append(read(num_bytes).decode())
            except UnicodeDecodeError as error:
                raise _Broken(f"a text before byte {position:,} is not UTF-8: {error}") from error
        self.position = position
        return texts

    def _scalar_reader(self, kind: int, key: str) -> Callable[[], Scalar]:
        if kind in _NUMBERS:
            return lambda: self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string
        if kind == _BOOLEAN:
            return lambda: self.take(1) != b"\0"
        raise _Broken(f"the metadata value {key[:80]!r} is of the unknown type {kind}")

    def _told(self, wanted: str) -> str:
        if self._is_bounded:
            return f"the header goes beyond {MAX_HEADER_BYTES:,} bytes; no model's needs so many"
        return (
            f"the header asks for {wanted} where {self.left:,} bytes are left; the file is cut off "
            "or broken, download it again"
        )
