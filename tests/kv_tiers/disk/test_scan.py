from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.kv_tiers.base import Cause, TierNamespace
from lora_serve.kv_tiers.disk import group_file
from lora_serve.kv_tiers.disk import scan as disk_scan
from lora_serve.kv_tiers.disk.change_log import Place
from lora_serve.kv_tiers.disk.directory import DiskDirectory
from lora_serve.kv_tiers.disk.group_file import GroupTable
from lora_serve.kv_tiers.disk.index import DiskIndex
from lora_serve.kv_tiers.disk.scan import DiskScan
from lora_serve.kv_tiers.disk.tier import DiskTier
from tests.fakes.kv_blocks import a_namespace, chain, records

NS = a_namespace()
HASHES = chain(NS, "a prompt", 24)


class GatedDirectory(DiskDirectory):
    """The first to list a namespace's files waits for `gate`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_listing = threading.Event()
        self.gate = threading.Event()

    def groups(self, root: bytes) -> list[str]:
        if not self.is_listing.is_set():
            self.is_listing.set()
            assert self.gate.wait(30), "the gate was not opened"
        return super().groups(root)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[GatedDirectory]:
    tier = DiskTier(tmp_path, 2**20)
    tier.save(NS, records(NS, HASHES))
    tier.close()
    directory = GatedDirectory(tmp_path)
    namespace = tmp_path / "namespaces" / NS.root.hex()
    os.utime(namespace, (1e9, 1e9))  # long ago: nothing is left to be looked at again
    yield directory
    directory.close()


def refuse(root: bytes, name: str, cause: Cause) -> None:
    raise AssertionError(f"{name} was refused: {cause}")


def test_readers_that_come_during_the_first_scan_find_what_it_finds(
    directory: GatedDirectory,
) -> None:
    index = DiskIndex()
    scan = DiskScan(directory, index, refuse, 0.02)
    assert directory.is_listing.wait(5)
    found: list[int] = []

    def read() -> None:
        assert not index.runs(HASHES, 24)
        if scan.look_again(NS.root):
            found.append(sum(run.count for run in index.runs(HASHES, 24)))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    directory.gate.set()
    for reader in readers:
        reader.join(5)
    scan.close()
    assert found == [24, 24, 24]


class UnsortableIndex(DiskIndex):
    def sort(self) -> None:
        raise MemoryError


def test_saves_do_not_wait_for_ever_for_a_first_scan_that_fails(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    scan = DiskScan(directory, UnsortableIndex(), refuse, 0.02)
    waiting = threading.Thread(target=scan.wait_until_complete, daemon=True)
    waiting.start()
    waiting.join(5)
    scan.close()
    directory.close()
    assert not waiting.is_alive()


@pytest.fixture
def disk_is_away(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, no file can be read."""
    is_away = threading.Event()

    def read_table(descriptor: int, namespace: TierNamespace) -> GroupTable:
        if is_away.is_set():
            raise OSError(errno.EIO, "the disk is away")
        return group_file.read_table(descriptor, namespace)

    monkeypatch.setattr(disk_scan, "read_table", read_table)
    return is_away


def num_found(index: DiskIndex) -> int:
    return sum(run.count for run in index.runs(HASHES, 24))


def test_a_file_that_cannot_be_read_for_a_moment_is_found_later(
    directory: GatedDirectory, disk_is_away: threading.Event
) -> None:
    disk_is_away.set()
    directory.gate.set()
    index = DiskIndex()
    scan = DiskScan(directory, index, refuse, 3600.0)
    scan.wait_until_complete()
    assert num_found(index) == 0
    disk_is_away.clear()
    scan.look_everywhere()
    scan.close()
    assert num_found(index) == 24


def test_an_announced_file_that_cannot_be_read_for_a_moment_is_found_later(
    directory: GatedDirectory, disk_is_away: threading.Event
) -> None:
    directory.gate.set()
    index = DiskIndex()
    scan = DiskScan(directory, index, refuse, 3600.0)
    scan.wait_until_complete()
    scan.look_everywhere()
    index.remove_namespace(NS.root)  # as if its files had only come now
    disk_is_away.set()
    scan.look_at([Place(NS.root, name) for name in directory.groups(NS.root)])
    disk_is_away.clear()
    scan.look_everywhere()
    scan.close()
    assert num_found(index) == 24


def test_a_tier_that_follows_others_finds_what_they_saved_just_now(tmp_path: Path) -> None:
    writer = DiskTier(tmp_path, 2**20, poll_seconds=1000)
    reader = DiskTier(tmp_path, 2**20, poll_seconds=1000, follows_others=True)
    reader.wait_until_indexed()
    for text in ("first", "second"):
        hashes = chain(NS, text, 3)
        assert reader.may_hold(NS, hashes[0])
        assert not reader.load(NS, hashes).records
        writer.save(NS, records(NS, hashes))
        assert reader.may_hold(NS, hashes[0])
        assert len(reader.load(NS, hashes).records) == 3
    for tier in (writer, reader):
        tier.close()
