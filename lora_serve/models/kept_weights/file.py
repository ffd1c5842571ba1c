"""The file of one model's packed weights: pieces of memory, then what they are.

    pieces, each at a multiple of 64 | header, JSON | digest of the header | its size | MAGIC

Its header tells the digest of the pieces, so a file that was cut or damaged is not taken.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from lora_serve.ops.kept_packing import PackedParts

MAGIC = b"lora-serve packed weights 1\n"
_ALIGNMENT = 64  # of kernels' weights
_AT_ONCE = 2**24
_END = len(MAGIC) + 8 + 16
_in_use: list[mmap.mmap] = []  # for good: kernels hold addresses alone

Piece = tuple[int, int]  # offset or address, and bytes


class UnreadableFileError(Exception):
    """Raised for what is no whole file of packed weights."""


class KeptTable(msgspec.Struct, frozen=True):
    """A tensor as it lies in memory. dtype: without "torch."."""

    dtype: str
    shape: tuple[int, ...]
    piece: Piece


class KeptCodes(msgspec.Struct, frozen=True):
    """What a matrix of codes was, without its numbers. Dtypes are without "torch."."""

    format: tuple[str, int, int, int, int]
    shape: tuple[int, ...]
    groups: tuple[int, ...]
    scales_dtype: str
    has_offsets: bool


class KeptPack(msgspec.Struct, frozen=True):
    """A `PackedParts` whose pieces lie in the file."""

    what: str
    pieces: tuple[Piece, ...]
    layout: tuple[int, ...]


class Taken(msgspec.Struct, frozen=True):
    """What a model took of its checkpoint.

    digests: hexadecimal, of every tensor, as `WeightReader` has them. matrices: shapes of those
    that were only packed. codes: likewise, as codes.
    """

    digests: Mapping[str, str]
    matrices: Mapping[str, tuple[int, ...]]
    codes: Mapping[str, KeptCodes]


class _Header(msgspec.Struct, frozen=True):
    key: str
    taken: Taken
    tables: Mapping[str, KeptTable]
    packs: tuple[KeptPack, ...]
    num_bytes: int  # of all pieces
    digest: str


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file that is mapped for good. tables: may not be written to."""

    taken: Taken
    tables: Mapping[str, Tensor]
    packs: tuple[PackedParts, ...]


def write_kept(
    descriptor: int,
    key: str,
    taken: Taken,
    tables: Mapping[str, Tensor],
    packs: Iterable[PackedParts],
) -> None:
    """Write the whole file. Raises OSError."""
    writer = _Writer(descriptor)
    kept_tables = {
        name: KeptTable(_name(table.dtype), tuple(table.shape), writer.piece(*_memory(table)))
        for name, table in tables.items()
    }
    kept_packs = tuple(
        KeptPack(pack.what, tuple(writer.piece(*part) for part in pack.parts), pack.layout)
        for pack in packs
    )
    header = msgspec.json.encode(
        _Header(key, taken, kept_tables, kept_packs, writer.num_bytes, writer.hexdigest())
    )
    digest, size = xxhash.xxh3_128_digest(header), len(header).to_bytes(8, "little")
    writer.write(memoryview(header + digest + size + MAGIC))


def map_kept(descriptor: int, key: str, note: Callable[[int], object]) -> KeptFile:
    """Map the file that `write_kept` wrote with this key, and check all of it.

    note: told the bytes that were checked.

    Raises:
        UnreadableFileError: it is another's, or not whole.
        OSError: it cannot be mapped.
    """
    size = os.fstat(descriptor).st_size
    if size <= _END:
        raise UnreadableFileError(f"it has {size} bytes")
    mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    header = _header(mapped)
    if header.key != key:
        raise UnreadableFileError("it is of another model")
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    content = memoryview(mapped)[: header.num_bytes]
    hashed = xxhash.xxh3_128()
    for start in range(0, len(content), _AT_ONCE):
        part = content[start : start + _AT_ONCE]
        hashed.update(part)
        note(len(part))
    if hashed.hexdigest() != header.digest:
        raise UnreadableFileError("its bytes are not those that were written")
    _in_use.append(mapped)
    base: int = np.frombuffer(mapped, np.uint8).ctypes.data
    return KeptFile(
        header.taken,
        {name: _tensor(base, table) for name, table in header.tables.items()},
        tuple(
            PackedParts(
                pack.what,
                tuple((base + at, count) for at, count in pack.pieces),
                pack.layout,
                mapped,
            )
            for pack in header.packs
        ),
    )


def _header(mapped: mmap.mmap) -> _Header:
    end = len(mapped) - len(MAGIC)
    if mapped[end:] != MAGIC:
        raise UnreadableFileError("its end is missing")
    size = int.from_bytes(mapped[end - 8 : end], "little")
    begin = end - 24 - size
    if begin < 0:
        raise UnreadableFileError("its header is missing")
    text = mapped[begin : begin + size]
    if xxhash.xxh3_128_digest(text) != mapped[begin + size : end - 8]:
        raise UnreadableFileError("its header is damaged")
    return msgspec.json.decode(text, type=_Header)


class _Writer:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._hashed = xxhash.xxh3_128()
        self.num_bytes = 0

    def piece(self, address: int, count: int) -> Piece:
        """Write this memory; where it lies in the file."""
        self.write(memoryview(bytes(-self.num_bytes % _ALIGNMENT)))
        offset = self.num_bytes
        self.write(memoryview((ctypes.c_ubyte * count).from_address(address)).cast("B"))
        return offset, count

    def hexdigest(self) -> str:
        return self._hashed.hexdigest()

    def write(self, memory: memoryview) -> None:
        for start in range(0, len(memory), _AT_ONCE):
            began = time.monotonic()
            part = memory[start : start + _AT_ONCE]
            self._hashed.update(part)
            while part:
                part = part[os.write(self._descriptor, part) :]
            if len(memory) > _AT_ONCE:  # leave as much time to what else wants the processor
                time.sleep(time.monotonic() - began)
        self.num_bytes += len(memory)


def _memory(table: Tensor) -> Piece:
    assert table.is_contiguous(), "a table with gaps"
    return table.data_ptr(), table.nbytes


def _tensor(base: int, table: KeptTable) -> Tensor:
    offset, count = table.piece
    memory = (ctypes.c_ubyte * count).from_address(base + offset)
    dtype: torch.dtype = getattr(torch, table.dtype)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(table.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
