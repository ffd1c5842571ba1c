from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash

from lora_serve.errors import ConfigError
from lora_serve.kv_tiers.base import Cause, Record, Tier
from lora_serve.kv_tiers.codec import HEADER_BYTES, NO_KEYS, make_record, refusal
from lora_serve.kv_tiers.disk.tier import DiskTier
from lora_serve.kv_tiers.mac import MacKeys, read_mac_keys
from lora_serve.kv_tiers.redis.keyspace import PREFIX
from lora_serve.kv_tiers.redis.tier import RedisTier
from tests.fakes.kv_blocks import a_namespace, chain, content
from tests.fakes.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

NS = a_namespace()
HASHES = chain(NS, "a prompt", 4)
OLD, NEW = b"o" * 32, b"n" * 32


def signed(keys: MacKeys, wrong: bool = False) -> list[Record]:
    blocks = [(one, bytes(NS.block_bytes) if wrong else content(NS, one)) for one in HASHES]
    return [make_record(NS, block_hash, block, 0.0, keys) for block_hash, block in blocks]


def forged(record: Record) -> Record:
    """Another payload, with a checksum that is right."""
    payload = bytes(len(record.payload))
    head = record.header[:-16]
    return Record(record.block_hash, head + xxhash.xxh3_128_digest(head + payload), payload)


@pytest.mark.parametrize(
    ("writes", "reads", "cause"),
    [
        ((), (), None),
        ((OLD,), (OLD,), None),
        ((OLD,), (NEW, OLD), None),
        ((NEW, OLD), (NEW,), None),
        ((NEW, OLD), (OLD,), Cause.KEY),
        ((), (OLD,), Cause.KEY),
        ((OLD,), (), Cause.KEY),
    ],
)
def test_the_first_key_signs_and_any_is_accepted(
    writes: Sequence[bytes], reads: Sequence[bytes], cause: Cause | None
) -> None:
    for record in signed(MacKeys(writes)):
        assert refusal(NS, record, MacKeys(reads)) == cause


def test_a_forged_record_is_refused_as_such_though_its_checksum_is_right() -> None:
    keys = MacKeys([OLD])
    for record in signed(keys):
        assert refusal(NS, forged(record), keys) == Cause.MAC
        assert refusal(NS, forged(record), NO_KEYS) == Cause.KEY


def test_every_byte_that_is_signed_counts() -> None:
    keys = MacKeys([OLD])
    (record, *_) = signed(keys)
    for offset in (24, 100, 105, 119):  # time written, key id, MAC
        head = bytearray(record.header[:-16])
        head[offset] ^= 1
        header = bytes(head) + xxhash.xxh3_128_digest(bytes(head) + bytes(record.payload))
        changed = Record(record.block_hash, header, record.payload)
        assert refusal(NS, changed, keys) in (Cause.MAC, Cause.KEY)


# ── tiers ───────────────────────────────────────────────────────────────────────────────────


class DiskPlace:
    """Where servers with different keys share a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, *keys: bytes) -> Tier:
        tier = DiskTier(self._path, 2**20, keys=MacKeys(keys))
        tier.wait_until_indexed()
        return tier

    def forge(self) -> None:
        (file,) = self._path.glob("namespaces/*/*.kv")
        file.write_bytes(rewritten(file.read_bytes()))


class RedisPlace:
    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def open(self, *keys: bytes) -> Tier:
        return RedisTier(self._server.url, 5.0, keys=MacKeys(keys))

    def forge(self) -> None:
        with self._server.client() as client:
            for key in client.scan_iter(match=PREFIX + b"block:*"):
                client.set(key, rewritten(client.get(key)))


def rewritten(data: bytes) -> bytes:
    """Forge all records that stand at the end of `data`."""
    size = HEADER_BYTES + NS.block_bytes
    count = len(data) // size
    start = len(data) - count * size
    parts = [data[start + i * size : start + (i + 1) * size] for i in range(count)]
    records = [forged(Record(HASHES[0], one[:HEADER_BYTES], one[HEADER_BYTES:])) for one in parts]
    return data[:start] + b"".join(one.header + bytes(one.payload) for one in records)


@pytest.fixture(params=["disk", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> DiskPlace | RedisPlace:
    if request.param == "disk":
        return DiskPlace(tmp_path / "kv")
    return RedisPlace(request.getfixturevalue("redis_server"))


@contextmanager
def opened(place: DiskPlace | RedisPlace, *keys: bytes) -> Iterator[Tier]:
    tier = place.open(*keys)
    yield tier
    tier.close()


def found(tier: Tier) -> tuple[int, Cause | None]:
    loaded = tier.load(NS, HASHES)
    assert all(record.payload == content(NS, record.block_hash) for record in loaded.records)
    return len(loaded.records), loaded.cause


def test_who_has_no_key_cannot_forge_kv(place: DiskPlace | RedisPlace) -> None:
    with opened(place, OLD) as tier:
        tier.save(NS, signed(MacKeys([OLD])))
    place.forge()
    with opened(place, OLD) as tier:
        assert found(tier) == (0, Cause.MAC)
        assert sum(tier.contents().quarantined.values()) == 1


def test_what_was_written_without_a_key_is_a_miss_and_is_written_anew(
    place: DiskPlace | RedisPlace,
) -> None:
    with opened(place) as tier:
        tier.save(NS, signed(NO_KEYS))
    with opened(place, OLD) as tier:
        for i in range(len(HASHES)):
            count, cause = found(tier)
            if cause is not Cause.KEY:
                break
            tier.save(NS, signed(MacKeys([OLD])))
            assert (count, cause) == (i, Cause.KEY)
        assert found(tier) == (4, None)


def test_keys_are_rotated_without_a_miss(place: DiskPlace | RedisPlace) -> None:
    with opened(place, OLD) as tier:
        tier.save(NS, signed(MacKeys([OLD])))
    with opened(place, NEW, OLD) as tier:
        assert found(tier) == (4, None)


def test_a_file_by_a_key_that_a_server_lacks_stays_for_the_others(tmp_path: Path) -> None:
    place = DiskPlace(tmp_path / "kv")
    with opened(place, OLD) as tier:
        tier.save(NS, signed(MacKeys([OLD])))
    with opened(place, NEW) as tier:
        assert found(tier) == (0, Cause.KEY)
        assert found(tier) == (0, Cause.ABSENT)
        assert tier.contents().num_bytes > 4 * NS.block_bytes, "it counts for the bound"
    with opened(place, OLD) as tier:
        assert found(tier) == (4, None)


# ── the file ────────────────────────────────────────────────────────────────────────────────


def key_file(path: Path, text: str, mode: int = 0o600) -> str:
    (path / "keys").write_text(text)
    (path / "keys").chmod(mode)
    return str(path / "keys")


def test_without_a_file_nothing_is_signed() -> None:
    (record, *_) = signed(read_mac_keys(None))
    assert refusal(NS, record, NO_KEYS) is None


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_the_file_holds_a_key_a_line(tmp_path: Path, mode: int) -> None:
    text = f"# since May\n{NEW.hex()}\n\n  # before\n{OLD.hex()}\n"
    keys = read_mac_keys(key_file(tmp_path, text, mode))
    assert refusal(NS, signed(MacKeys([OLD]))[0], keys) is None
    assert refusal(NS, signed(keys)[0], MacKeys([NEW])) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key; write one with: openssl rand -hex 32"),
        ("ab" * 31, "line 1 has 31 bytes, at least 32 are needed"),
        (f"{OLD.hex()}\nsecret words", "line 2 is not hexadecimal"),
    ],
)
def test_a_file_without_good_keys_is_refused_and_not_quoted(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--kv-mac-key-file /.*/keys: {message}") as error:
        read_mac_keys(key_file(tmp_path, text))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o620, 0o666])
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=rf"mode 0{mode:o} lets others .*; chmod 600 /"):
        read_mac_keys(key_file(tmp_path, OLD.hex(), mode))


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path, OLD.hex())
    if os.geteuid() == 0:
        os.chown(path, 54321, 54321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(ConfigError, match=r"belongs to uid \d+, who could change it"):
        read_mac_keys(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: object) -> None:
    make(tmp_path / "keys")  # type: ignore[operator]
    with pytest.raises(ConfigError, match="--kv-mac-key-file"):
        read_mac_keys(str(tmp_path / "keys"))
