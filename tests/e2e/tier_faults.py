"""Faults of the KV tiers, put into a real disk path or a real redis-server while requests run.

Each fault is a context: it is there inside, and what can be undone is undone after it. `sees` is
what the server must have counted meanwhile, so that no row of a table passes by missing its mark.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import xxhash

from lora_serve.kv_tiers.codec import HEADER_BYTES, VERSION, make_record
from lora_serve.kv_tiers.disk.directory import DiskDirectory
from lora_serve.kv_tiers.redis.keyspace import PREFIX
from tests.fakes.kv_files import table_of, write_group_file
from tests.fakes.redis_server import RedisServer

FLIPPED = 4096  # an offset in the first block's payload


@dataclass(frozen=True)
class Fault:
    """name: as in "the disk is …". sees: causes, one of which is counted; none: nothing need be."""

    name: str
    put: Callable[..., AbstractContextManager[None]]
    sees: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


# ── files ───────────────────────────────────────────────────────────────────────────────────


def groups(path: Path) -> list[Path]:
    return sorted(path.glob("namespaces/*/*.kv"))


@contextmanager
def each_file(path: Path, damage: Callable[[Path], None]) -> Iterator[None]:
    files = groups(path)
    assert files, "nothing was stored that could be damaged"
    for file in files:
        damage(file)
    yield


def files(damage: Callable[[Path], None]) -> Callable[[Path], AbstractContextManager[None]]:
    return lambda path: each_file(path, damage)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(FLIPPED)
        (byte,) = opened.read(1)
        opened.seek(FLIPPED)
        opened.write(bytes([byte ^ 16]))


def empty(file: Path) -> None:
    os.truncate(file, 0)


def another_format(file: Path) -> None:
    """The version in each record's header; the table, which is known already, stays."""
    data = bytearray(file.read_bytes())
    count, _, block_bytes = struct.unpack_from("<IIxxxxQ", data, 12)
    size = HEADER_BYTES + block_bytes
    for record in range(count):
        struct.pack_into("<I", data, len(data) - (count - record) * size + 8, VERSION + 1)
    file.write_bytes(data)


def from_another(**changes: bytes) -> Callable[[Path], None]:
    """Whole files in these files' place, as a server of another model or dtype writes them."""

    def damage(file: Path) -> None:
        directory = DiskDirectory(file.parents[2])
        namespace = directory.describe(bytes.fromhex(file.parent.name))
        directory.close()
        assert namespace is not None
        hashes = table_of(file, namespace).hashes
        foreign = replace(namespace, **changes)  # type: ignore[arg-type]
        wrong = [make_record(foreign, one, bytes(namespace.block_bytes), 0.0) for one in hashes]
        file.unlink()
        write_group_file(file, namespace, wrong)

    return damage


def another_block_size(file: Path) -> None:
    directory = DiskDirectory(file.parents[2])
    namespace = directory.describe(bytes.fromhex(file.parent.name))
    directory.close()
    assert namespace is not None
    half = replace(namespace, block_bytes=namespace.block_bytes // 2)
    hashes = table_of(file, namespace).hashes
    file.unlink()
    write_group_file(
        file, half, [make_record(half, one, bytes(half.block_bytes), 0.0) for one in hashes]
    )


@contextmanager
def swapped(path: Path) -> Iterator[None]:
    """Each file is in the place of the next one."""
    found = groups(path)
    assert len(found) > 1, "one file cannot be swapped"
    contents = [file.read_bytes() for file in found]
    for file, data in zip(found, (*contents[1:], contents[0]), strict=True):
        file.write_bytes(data)
    yield


@contextmanager
def full(path: Path) -> Iterator[None]:
    if not os.path.ismount(path.parent):
        pytest.skip("NO TMPFS CAN BE MOUNTED HERE: a full disk is not tested")
    filler = path.with_name("filler")
    with filler.open("wb") as file:
        try:
            while file.write(bytes(2**16)):
                file.flush()
        except OSError:
            pass
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Mount `path` read-only for the server; files that it holds open stay as they are."""
    if not mounted("--bind", str(path), str(path)):
        pytest.skip("NOTHING CAN BE MOUNTED HERE: a read-only disk is not tested")
    try:
        assert mounted("-o", "remount,bind,ro", str(path), str(path))
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(path)), check=True)


def mounted(*arguments: str) -> bool:
    return subprocess.run(("mount", *arguments), capture_output=True).returncode == 0


@contextmanager
def unplugged(path: Path) -> Iterator[None]:
    away = path.with_name("unplugged")
    path.rename(away)
    yield
    away.rename(path)


@contextmanager
def removed(path: Path) -> Iterator[None]:
    for entry in path.iterdir():
        subprocess.run(("rm", "-rf", str(entry)), check=True)
    yield


DISK_FAULTS = (
    Fault("full", full, ("error",)),
    Fault("read-only", read_only, ("error",)),
    Fault("removed", removed),  # nothing is known to be there, so it is not asked for
    Fault("unplugged", unplugged, ("absent", "error")),
    Fault("truncated", files(cut), ("truncated",)),
    Fault("emptied", files(empty), ("truncated",)),
    Fault("flipped", files(flip), ("checksum",)),
    Fault("swapped", swapped, ("swapped", "layout", "truncated", "foreign", "checksum")),
    Fault("of another model", files(from_another(model=b"another")), ("layout",)),
    Fault("of another dtype", files(from_another(layout=b"another")), ("layout",)),
    Fault("of another block size", files(another_block_size), ("truncated", "foreign", "swapped")),
    Fault("of another format version", files(another_format), ("version",)),
)


# ── Redis ───────────────────────────────────────────────────────────────────────────────────


def blocks(server: RedisServer) -> dict[bytes, bytes]:
    with server.client() as client:
        keys = sorted(client.scan_iter(match=PREFIX + b"block:*"))
        return dict(zip(keys, client.mget(keys), strict=True))


@contextmanager
def each_value(server: RedisServer, lie: Callable[[list[bytes]], list[bytes]]) -> Iterator[None]:
    found = blocks(server)
    assert found, "nothing was stored that could be damaged"
    with server.client() as client:
        client.mset(dict(zip(found, lie(list(found.values())), strict=True)))
    yield


def values(
    lie: Callable[[list[bytes]], list[bytes]],
) -> Callable[[RedisServer], AbstractContextManager[None]]:
    return lambda server: each_value(server, lie)


def wrong_bytes(found: list[bytes]) -> list[bytes]:
    return [
        value[:FLIPPED] + bytes([value[FLIPPED] ^ 16]) + value[FLIPPED + 1 :] for value in found
    ]


def wrong_records(found: list[bytes]) -> list[bytes]:
    return [*found[1:], found[0]]


def of_another_model(found: list[bytes]) -> list[bytes]:
    """Whole records, checksum and all, with another fingerprint (codec.py: 32 bytes from 32 on)."""
    end = HEADER_BYTES - 16
    heads = [value[:32] + bytes(32) + value[64:end] for value in found]
    return [
        head + xxhash.xxh3_128_digest(head + value[HEADER_BYTES:]) + value[HEADER_BYTES:]
        for head, value in zip(heads, found, strict=True)
    ]


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    server.pause()
    yield
    server.resume()


@contextmanager
def killed(server: RedisServer) -> Iterator[None]:
    server.kill()
    yield
    server.start()


@contextmanager
def restarted(server: RedisServer) -> Iterator[None]:
    server.kill()
    server.start()
    yield


@contextmanager
def slow(server: RedisServer) -> Iterator[None]:
    """Answers come later than any deadline, and in the middle of what follows."""
    with server.client() as client:
        client.execute_command("CLIENT", "PAUSE", "700", "ALL")
    yield


@contextmanager
def out_of_memory(server: RedisServer) -> Iterator[None]:
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
        yield
        client.config_set("maxmemory", "0")


REDIS_FAULTS = (
    Fault("stopped", stopped, ("deadline", "error", "breaker_open")),
    Fault("killed", killed, ("error", "breaker_open")),
    Fault("restarted", restarted, ("absent", "error")),
    Fault("slow", slow, ("deadline", "error", "breaker_open")),
    Fault("full", out_of_memory, ("error",)),
    Fault("giving wrong bytes", values(wrong_bytes), ("checksum",)),
    Fault("giving others' records", values(wrong_records), ("swapped",)),
    Fault("giving another model's records", values(of_another_model), ("layout",)),
    Fault("giving cut records", values(lambda found: [one[:-9] for one in found]), ("truncated",)),
    Fault("giving nothing", values(lambda found: [b""] * len(found)), ("truncated",)),
)
