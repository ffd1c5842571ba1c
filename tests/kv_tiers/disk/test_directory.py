from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lora_serve.kv_tiers.base import Buffer
from lora_serve.kv_tiers.disk.directory import DiskDirectory
from tests.fakes.full_disk import no_room_beyond
from tests.fakes.kv_blocks import a_namespace

NS = a_namespace()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DiskDirectory]:
    directory = DiskDirectory(tmp_path)
    yield directory
    directory.close()


@pytest.mark.parametrize("num_bytes", [0, 40])
def test_a_namespace_whose_descriptor_finds_no_room_leaves_nothing_behind(
    directory: DiskDirectory, tmp_path: Path, num_bytes: int
) -> None:
    with no_room_beyond(num_bytes):
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                directory.ensure(NS)
    assert directory.roots() == []
    assert [one.name for one in tmp_path.glob("staging/*/*")] == ["lock"]
    directory.ensure(NS).close()
    assert directory.describe(NS.root) == NS
    assert [one.name for one in tmp_path.glob("staging/*/*")] == ["lock"]


def test_a_descriptor_is_whole_though_each_write_takes_few_bytes(
    directory: DiskDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def write_few(descriptor: int, buffers: Sequence[Buffer]) -> int:
        return write(descriptor, b"".join(buffers)[:7])

    monkeypatch.setattr(os, "writev", write_few)
    directory.ensure(NS).close()
    assert directory.describe(NS.root) == NS
