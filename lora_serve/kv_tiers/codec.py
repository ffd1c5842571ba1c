r"""A record: one block's bytes behind a header that says what they are. Same in every tier.

    magic "lora-kv\n" · version u32 · length of the hash u32 · length of the payload u64
    · time written f64 · fingerprint of model and layout (32) · block hash (32, zero-padded)
    · id of the key (8) · MAC (16), both zeros without keys (mac.py)
    · xxh3-128 over all of the above and the payload (16)              little-endian, 136 bytes

Every read is checked against what was asked for: a record that was cut off, flipped, put in
another's place, or written by another model, layout or version is refused, with a cause. One from
where others may write must also be signed as this server's keys say.
"""

from __future__ import annotations

import hashlib
import struct

import xxhash

from lora_serve.identity import BlockHash, framed
from lora_serve.kv_tiers.base import Buffer, Cause, Record, TierNamespace
from lora_serve.kv_tiers.mac import KEY_ID_BYTES, MAC_BYTES, MacKeys

MAGIC = b"lora-kv\n"
VERSION = 2
MAX_HASH_BYTES = 32

_FIELDS = struct.Struct("<8sIIQd32s32s")
_CHECKSUM_BYTES = 16
_MAC_END = _FIELDS.size + KEY_ID_BYTES + MAC_BYTES
HEADER_BYTES = _MAC_END + _CHECKSUM_BYTES

NO_KEYS = MacKeys()


def record_bytes(namespace: TierNamespace) -> int:
    """Size of each record of a namespace."""
    return HEADER_BYTES + namespace.block_bytes


def format_fingerprint(namespace: TierNamespace) -> bytes:
    """A digest of all that must agree for a block's bytes to mean the same."""
    size = str(namespace.block_bytes).encode()
    return hashlib.sha256(framed(namespace.model, namespace.layout, size)).digest()


def make_record(
    namespace: TierNamespace,
    block_hash: BlockHash,
    payload: Buffer,
    written: float,
    keys: MacKeys = NO_KEYS,
) -> Record:
    """`payload` behind its header; it is not copied. `written` is in seconds since 1970."""
    assert len(payload) == namespace.block_bytes, f"{len(payload)} bytes are not a block"
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        len(block_hash),
        len(payload),
        written,
        format_fingerprint(namespace),
        block_hash,
    )
    head = fields + b"".join(keys.sign(fields, payload))
    return Record(block_hash, head + _checksum(head, payload), payload)


def written_time(header: bytes) -> float | None:
    """The time at which a record says it was written, in seconds since 1970; unchecked."""
    return float(_FIELDS.unpack_from(header)[4]) if len(header) == HEADER_BYTES else None


def refusal(namespace: TierNamespace, record: Record, keys: MacKeys) -> Cause | None:
    """Why a record from elsewhere is not the block `record.block_hash` by `keys`; None if it is."""
    cause = damage(namespace, record)
    if cause is not None:
        return cause
    fields, signature = record.header[: _FIELDS.size], record.header[_FIELDS.size : _MAC_END]
    key_id, mac = signature[:KEY_ID_BYTES], signature[KEY_ID_BYTES:]
    return keys.refusal(key_id, mac, fields, record.payload)


def damage(namespace: TierNamespace, record: Record) -> Cause | None:
    """Why this record is not the block that `record.block_hash` names, but for forgery."""
    header, payload = record.header, record.payload
    if len(header) != HEADER_BYTES:
        return Cause.TRUNCATED
    magic, version, hash_bytes, payload_bytes, _, fingerprint, padded = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        return Cause.FOREIGN
    if version != VERSION:
        return Cause.VERSION
    if fingerprint != format_fingerprint(namespace):
        return Cause.LAYOUT
    if hash_bytes > MAX_HASH_BYTES or padded[:hash_bytes] != record.block_hash:
        return Cause.SWAPPED
    if len(payload) != payload_bytes or payload_bytes != namespace.block_bytes:
        return Cause.TRUNCATED
    if header[_MAC_END:] != _checksum(header[:_MAC_END], payload):
        return Cause.CHECKSUM
    return None


def _checksum(head: bytes, payload: Buffer) -> bytes:
    state = xxhash.xxh3_128(head)
    state.update(payload)
    return state.digest()
