"""Foreign files in the disk tier: no block is served but the right one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import xxhash
from hypothesis import strategies as st

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Record
from lora_serve.kv_tiers.codec import NO_KEYS, record_bytes, refusal
from lora_serve.kv_tiers.disk.group_file import (
    RefusedGroupError,
    read_records,
    read_table,
)
from tests.fakes.kv_blocks import a_namespace, chain, content, records
from tests.fakes.kv_files import write_group_file
from tests.hostile.harness import run_long, run_quick
from tests.hostile.mutations import NUMBERS, harmed

NAMESPACE = a_namespace()
FOREIGN = (a_namespace(version="B"), a_namespace(layout=b"other"), a_namespace(model=b"other"))
HASHES = chain(NAMESPACE, "p", 4)
TABLE_BYTES = 64 + 32 * len(HASHES) + 16
HEADER_BYTES = record_bytes(NAMESPACE) - NAMESPACE.block_bytes


def group_of(*args: object) -> bytes:
    namespace, hashes = args
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "group")
        write_group_file(path, namespace, records(namespace, hashes))  # type: ignore[arg-type]
        return path.read_bytes()


SOUND = group_of(NAMESPACE, HASHES)
OTHERS = [group_of(other, chain(other, "p", 4)) for other in FOREIGN]


@st.composite
def swapped(draw: st.DrawFn) -> bytes:
    """Records in each other's places, or another namespace's records behind this one's table."""
    size = record_bytes(NAMESPACE)
    source = draw(st.sampled_from([SOUND, *OTHERS]))
    parts = [source[TABLE_BYTES + i * size : TABLE_BYTES + (i + 1) * size] for i in range(4)]
    return SOUND[:TABLE_BYTES] + b"".join(draw(st.permutations(parts)))


@st.composite
def crafted(draw: st.DrawFn) -> bytes:
    """A table that says anything, with the right checksum; and records that do."""
    data = bytearray(SOUND)
    for start, end in ((0, TABLE_BYTES), (TABLE_BYTES, TABLE_BYTES + HEADER_BYTES)):
        if draw(st.booleans()):
            at = draw(st.integers(start, end - 17))
            size = draw(st.sampled_from([4, 8]))
            data[at : at + size] = (draw(NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")
    head = bytes(data[: TABLE_BYTES - 16])
    data[TABLE_BYTES - 16 : TABLE_BYTES] = xxhash.xxh3_128_digest(head)
    fields = bytes(data[TABLE_BYTES : TABLE_BYTES + HEADER_BYTES - 16])
    payload = bytes(data[TABLE_BYTES + HEADER_BYTES : TABLE_BYTES + record_bytes(NAMESPACE)])
    checksum = xxhash.xxh3_128_digest(fields + payload)
    data[TABLE_BYTES + HEADER_BYTES - 16 : TABLE_BYTES + HEADER_BYTES] = checksum
    return bytes(data)


CASES = st.one_of(harmed(SOUND), *(harmed(other, 1) for other in OTHERS), swapped(), crafted())


def accepted(data: bytes) -> dict[BlockHash, bytes]:
    """Whatever of a file would be served, by the hash that was asked for."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            table = read_table(file.fileno(), NAMESPACE)
        except RefusedGroupError:
            return {}
        buffer = memoryview(bytearray(record_bytes(NAMESPACE) * len(table.hashes)))
        found = read_records(file.fileno(), NAMESPACE, table, 0, buffer)
        return {
            r.block_hash: bytes(r.payload) for r in found if refusal(NAMESPACE, r, NO_KEYS) is None
        }


def check(case: object) -> None:
    assert isinstance(case, bytes)
    for block_hash, payload in accepted(case).items():
        if block_hash in HASHES:
            assert payload == content(NAMESPACE, block_hash), "a block that was never stored"


def test_a_sound_file_is_served_whole() -> None:
    assert accepted(SOUND) == {h: content(NAMESPACE, h) for h in HASHES}


def test_no_file_serves_a_block_that_was_never_stored() -> None:
    run_quick(CASES, check, 600)


@pytest.mark.slow
def test_no_file_serves_a_block_that_was_never_stored_for_minutes() -> None:
    assert run_long(CASES, check)


@st.composite
def record_bytes_of(draw: st.DrawFn) -> Record:
    data = draw(harmed(SOUND[TABLE_BYTES : TABLE_BYTES + record_bytes(NAMESPACE)]))
    return Record(HASHES[0], data[:HEADER_BYTES], data[HEADER_BYTES:])


def test_no_record_is_taken_for_another() -> None:
    def check_record(case: object) -> None:
        assert isinstance(case, Record)
        if refusal(NAMESPACE, case, NO_KEYS) is None:
            assert bytes(case.payload) == content(NAMESPACE, HASHES[0])

    run_quick(record_bytes_of(), check_record, 300)
