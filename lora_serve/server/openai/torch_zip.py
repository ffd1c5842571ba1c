"""Entries of a zip file as torch.save writes it: stored, never compressed.

Copies nothing and expands nothing, so a payload is never larger than it is. Python's zipfile would
build an object for each of the entries that a file declares, before one could count them.
"""

from __future__ import annotations

import struct
import zlib

_END = struct.Struct("<4s4H2IH")  # signature, disks, entries, size and offset of the directory
_DIRECTORY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_STORED = 0
_ENCRYPTED = 0x1


def stored_entries(data: bytes, max_entries: int) -> dict[str, memoryview]:
    """Name to content, with checksums verified.

    Raises:
        ValueError: what is wrong with the file.
    """
    num_entries, position = _end_of_directory(data, max_entries)
    view, entries, num_bytes = memoryview(data), dict[str, memoryview](), 0
    for _ in range(num_entries):
        name, content, position = _entry(view, position)
        num_bytes += len(content)
        if name in entries or num_bytes > len(data):
            raise ValueError("its zip entries overlap")
        entries[name] = content
    return entries


def _end_of_directory(data: bytes, max_entries: int) -> tuple[int, int]:
    """Number of entries, and where the directory begins."""
    if len(data) < _END.size:
        raise ValueError("the zip file is cut off")
    signature, _, _, _, num_entries, _, offset, _ = _END.unpack_from(data, len(data) - _END.size)
    if signature != b"PK\x05\x06":
        raise ValueError("the zip file does not end with its directory; it may be cut off")
    if num_entries > max_entries:
        raise ValueError(f"its zip file has {num_entries} entries, at most {max_entries} are read")
    return num_entries, offset


def _entry(data: memoryview, position: int) -> tuple[str, memoryview, int]:
    """Name and content of the entry that the directory has at `position`, and where it goes on."""
    fields = _unpack(_DIRECTORY, data, position, b"PK\x01\x02")
    flags, method, checksum, stored, size = fields[3], fields[4], *fields[7:10]
    name_length, offset = fields[10], fields[16]
    if method != _STORED or flags & _ENCRYPTED or stored != size:
        raise ValueError("its zip entries are compressed or encrypted, torch.save stores them")
    local = _unpack(_LOCAL, data, offset, b"PK\x03\x04")
    start = offset + _LOCAL.size + local[9] + local[10]
    content = data[start : start + size]
    if len(content) != size or zlib.crc32(content) != checksum:
        raise ValueError("a zip entry is cut off or does not match its checksum")
    begin = position + _DIRECTORY.size
    name = bytes(data[begin : begin + name_length]).decode("utf-8", "replace")
    return name, content, begin + name_length + fields[11] + fields[12]


def _unpack(
    layout: struct.Struct, data: memoryview, position: int, signature: bytes
) -> tuple[int, ...]:
    if position + layout.size > len(data) or data[position : position + 4] != signature:
        raise ValueError("the directory of its zip file is broken")
    return layout.unpack_from(data, position)
