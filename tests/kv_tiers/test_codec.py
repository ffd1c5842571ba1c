from __future__ import annotations

import struct

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Cause, Record, TierNamespace
from lora_serve.kv_tiers.codec import (
    HEADER_BYTES,
    NO_KEYS,
    VERSION,
    make_record,
    record_bytes,
)
from lora_serve.kv_tiers.codec import refusal as refusal_by
from tests.fakes.kv_blocks import a_namespace, chain, content

NS = a_namespace()
ONE, OTHER = chain(NS, "a prompt", 2)


def refusal(namespace: TierNamespace, record: Record) -> Cause | None:
    return refusal_by(namespace, record, NO_KEYS)


def the_record(namespace: TierNamespace = NS, block_hash: BlockHash = ONE) -> Record:
    return make_record(namespace, block_hash, content(namespace, block_hash), 1.5)


def reread(record: Record, data: bytes) -> Record:
    """What a tier makes of these bytes, when asked for the record's block."""
    return Record(record.block_hash, data[:HEADER_BYTES], data[HEADER_BYTES:])


def stored(record: Record) -> bytes:
    return record.header + bytes(record.payload)


def test_a_record_is_accepted_as_it_was_written() -> None:
    record = the_record()
    assert refusal(NS, record) is None
    assert record.num_bytes == len(stored(record)) == record_bytes(NS)
    assert refusal(NS, reread(record, stored(record))) is None


@given(bit=st.integers(0, 8 * record_bytes(NS) - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    data = bytearray(stored(the_record()))
    data[bit // 8] ^= 1 << bit % 8
    assert refusal(NS, reread(the_record(), bytes(data))) is not None


@given(length=st.integers(0, record_bytes(NS) - 1))
def test_any_truncation_is_refused(length: int) -> None:
    assert refusal(NS, reread(the_record(), stored(the_record())[:length])) == Cause.TRUNCATED


@given(data=st.binary(max_size=2 * record_bytes(NS)))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert refusal(NS, reread(the_record(), data)) is not None


def test_bytes_after_the_payload_are_refused() -> None:
    record = the_record()
    assert refusal(NS, reread(record, stored(record) + b"x")) == Cause.TRUNCATED


def test_another_blocks_record_is_refused_though_it_is_whole() -> None:
    foreign = stored(the_record(block_hash=OTHER))
    assert refusal(NS, reread(the_record(), foreign)) == Cause.SWAPPED


def test_a_shorter_hash_is_not_its_longer_neighbour() -> None:
    short = BlockHash(ONE[:16])
    record = make_record(NS, short, content(NS, ONE), 0.0)
    assert refusal(NS, record) is None
    assert refusal(NS, Record(ONE, record.header, record.payload)) == Cause.SWAPPED


def test_another_layout_model_or_block_size_is_refused() -> None:
    for other in (a_namespace(layout=b"other"), a_namespace(model=b"other")):
        assert refusal(other, the_record()) == Cause.LAYOUT
    larger = a_namespace(block_bytes=2 * NS.block_bytes)
    assert refusal(larger, the_record()) == Cause.LAYOUT


def test_another_version_of_the_format_is_refused() -> None:
    record = the_record()
    fields = bytearray(record.header[:-16])
    struct.pack_into("<I", fields, 8, VERSION + 1)
    checksum = xxhash.xxh3_128_digest(bytes(fields) + bytes(record.payload))
    assert refusal(NS, Record(ONE, bytes(fields) + checksum, record.payload)) == Cause.VERSION


def test_something_else_altogether_is_foreign() -> None:
    assert refusal(NS, Record(ONE, b"x" * HEADER_BYTES, b"")) == Cause.FOREIGN
