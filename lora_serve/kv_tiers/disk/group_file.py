"""One file of the disk tier: a group of records of one namespace, behind a table of their hashes.

    magic "lora-kvg" · version u32 · number of records u32 · bytes of a hash u32 · 0 u32
    · bytes of a block u64 · root (32, zero-padded) · hashes · xxh3-128 of all these (16)
    · records, as codec.py lays them out, one after another                  little-endian

With the table, indexing a directory costs one small read a file, and a run of blocks one large one.
Thousands of tokens are few files. Callers must check the records that they read (codec.refusal).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Buffer, Cause, Record, TierNamespace
from lora_serve.kv_tiers.codec import HEADER_BYTES, MAX_HASH_BYTES, record_bytes

MAGIC = b"lora-kvg"
VERSION = 2  # goes up with codec.VERSION, too: a file holds records of one version
MAX_RECORDS = 512  # header and payload are a buffer each: two calls of 1,024 (IOV_MAX) write it

_FIELDS = struct.Struct("<8sIIIIQ32s")
_CHECKSUM_BYTES = 16
_MAX_TABLE_BYTES = _FIELDS.size + MAX_RECORDS * MAX_HASH_BYTES + _CHECKSUM_BYTES


class RefusedGroupError(Exception):
    """A file that is not a whole group of this namespace; `cause` says why."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class GroupTable:
    """What a file's head says: which records follow, in this order."""

    hashes: tuple[BlockHash, ...]
    num_bytes: int


def group_bytes(namespace: TierNamespace, records: Sequence[Record]) -> int:
    """Size of the file that `write_group` writes."""
    table_bytes = _FIELDS.size + sum(len(record.block_hash) for record in records) + _CHECKSUM_BYTES
    return table_bytes + len(records) * record_bytes(namespace)


def write_group(descriptor: int, namespace: TierNamespace, records: Sequence[Record]) -> int:
    """Write and sync a file, new or reserved; returns its size in bytes. Raises OSError."""
    assert 0 < len(records) <= MAX_RECORDS, f"{len(records)} records are no group"
    buffers: list[Buffer] = [_table([record.block_hash for record in records], namespace)]
    for record in records:
        buffers += (record.header, record.payload)
    num_bytes = write_all(descriptor, buffers)
    os.fsync(descriptor)
    return num_bytes


def read_table(descriptor: int, namespace: TierNamespace) -> GroupTable:
    """The head of a file.

    Raises:
        RefusedGroupError: it is not a group of this namespace, or not whole.
        OSError: it cannot be read.
    """
    head = os.pread(descriptor, _MAX_TABLE_BYTES, 0)
    num_bytes = os.fstat(descriptor).st_size
    if len(head) < _FIELDS.size:
        raise RefusedGroupError(Cause.TRUNCATED)
    magic, version, count, hash_bytes, _, block_bytes, root = _FIELDS.unpack_from(head)
    if magic != MAGIC:
        raise RefusedGroupError(Cause.FOREIGN)
    if version != VERSION:
        raise RefusedGroupError(Cause.VERSION)
    if not (0 < count <= MAX_RECORDS and 0 < hash_bytes <= MAX_HASH_BYTES):
        raise RefusedGroupError(Cause.FOREIGN)
    end = _FIELDS.size + count * hash_bytes
    if head[end : end + _CHECKSUM_BYTES] != xxhash.xxh3_128_digest(head[:end]):
        raise RefusedGroupError(Cause.CHECKSUM)
    if root != _padded(namespace.root) or block_bytes != namespace.block_bytes:
        raise RefusedGroupError(Cause.SWAPPED)
    if num_bytes != end + _CHECKSUM_BYTES + count * record_bytes(namespace):
        raise RefusedGroupError(Cause.TRUNCATED)
    starts = range(_FIELDS.size, end, hash_bytes)
    return GroupTable(tuple(BlockHash(head[i : i + hash_bytes]) for i in starts), num_bytes)


def read_records(
    descriptor: int,
    namespace: TierNamespace,
    table: GroupTable,
    first: int,
    into: memoryview,
) -> list[Record]:
    """Read as many records from `first` on as `into` holds, in one read; unchecked.

    They are views of `into`, cut short where the file is.
    """
    size = record_bytes(namespace)
    hashes = table.hashes[first : first + len(into) // size]
    start = table.num_bytes - (len(table.hashes) - first) * size
    data = into[: os.preadv(descriptor, [into], start)].toreadonly()
    return [
        Record(
            block_hash,
            bytes(data[i * size : i * size + HEADER_BYTES]),
            data[i * size + HEADER_BYTES : (i + 1) * size],
        )
        for i, block_hash in enumerate(hashes)
    ]


def _table(hashes: Sequence[BlockHash], namespace: TierNamespace) -> bytes:
    hash_bytes = len(hashes[0])
    root = _padded(namespace.root)
    fields = _FIELDS.pack(MAGIC, VERSION, len(hashes), hash_bytes, 0, namespace.block_bytes, root)
    head = fields + b"".join(hashes)
    return head + xxhash.xxh3_128_digest(head)


def _padded(root: bytes) -> bytes:
    return root.ljust(MAX_HASH_BYTES, b"\0")


def write_all(descriptor: int, buffers: Sequence[Buffer]) -> int:
    """Write many buffers in few calls, each of which may take fewer bytes than it was given.

    Returns how many bytes they have. Raises OSError.
    """
    rest = [memoryview(buffer) for buffer in buffers]
    total = sum(len(buffer) for buffer in rest)
    while rest:
        written = os.writev(descriptor, rest[:1024])  # IOV_MAX
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][written:]
    return total
