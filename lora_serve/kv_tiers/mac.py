"""Keys by which servers that share KV know each other's records from forged ones.

HMAC-SHA256, cut to 16 bytes, over a record's header fields and its payload. The header names the
key by eight bytes that reveal nothing of it, so a record by a key that a server lacks is not taken
for a forged one: it may be good for others.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from lora_serve.errors import ConfigError
from lora_serve.kv_tiers.base import Buffer, Cause
from lora_serve.kv_tiers.secret_files import read_secret

KEY_ID_BYTES = 8
MAC_BYTES = 16
MIN_KEY_BYTES = 32
FLAG = "--kv-mac-key-file"
_NO_KEY_ID, _NO_MAC = bytes(KEY_ID_BYTES), bytes(MAC_BYTES)
_ID_SCHEME = b"lora-serve/kv-mac-key-id/1"


class MacKeys:
    """The first key signs, any of them is accepted. Without keys nothing is signed.

    A server with keys accepts what one of them has signed; one without, what is not signed.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._by_id = {_key_id(key): key for key in keys}
        self._writes_with = _key_id(keys[0]) if keys else _NO_KEY_ID

    def sign(self, fields: bytes, payload: Buffer) -> tuple[bytes, bytes]:
        """The id of the key that was used, and the MAC."""
        key_id = self._writes_with
        return key_id, self._mac(key_id, fields, payload)

    def refusal(self, key_id: bytes, mac: bytes, fields: bytes, payload: Buffer) -> Cause | None:
        """Why a record is not accepted; None if it is."""
        if key_id not in self._by_id and (self._by_id or key_id != _NO_KEY_ID):
            return Cause.KEY
        is_equal = hmac.compare_digest(mac, self._mac(key_id, fields, payload))
        return None if is_equal else Cause.MAC

    def _mac(self, key_id: bytes, fields: bytes, payload: Buffer) -> bytes:
        if not self._by_id:
            return _NO_MAC
        state = hmac.new(self._by_id[key_id], fields, hashlib.sha256)
        state.update(key_id)
        state.update(payload)
        return state.digest()[:MAC_BYTES]


def read_mac_keys(path: str | None) -> MacKeys:
    """The keys in a file: hexadecimal, one a line, the one to write with first. None: no keys.

    Blank lines and lines that begin with # count for nothing.

    Raises:
        ConfigError: the file cannot be read, is open to others, or a line is no key.
    """
    if path is None:
        return MacKeys()
    lines = [line.strip() for line in read_secret(FLAG, Path(path)).splitlines()]
    keys = [
        _parse_key(path, number, line)
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#")
    ]
    if not keys:
        raise ConfigError(f"{FLAG} {path}: holds no key; write one with: openssl rand -hex 32")
    return MacKeys(keys)


def _parse_key(path: str, number: int, line: str) -> bytes:
    try:
        key = bytes.fromhex(line)
    except ValueError:
        raise ConfigError(f"{FLAG} {path}: line {number} is not hexadecimal") from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{FLAG} {path}: line {number} has {len(key)} bytes, at least {MIN_KEY_BYTES} are "
            "needed; write one with: openssl rand -hex 32"
        )
    return key


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(_ID_SCHEME + key).digest()[:KEY_ID_BYTES]
