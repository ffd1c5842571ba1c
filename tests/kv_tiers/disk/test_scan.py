from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.kv_tiers.base import Cause
from lora_serve.kv_tiers.disk.directory import DiskDirectory
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
