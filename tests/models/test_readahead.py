from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_serve.models.checkpoints.safetensors import tensor_ranges
from lora_serve.models.readahead import FileRange, ReadAhead


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.arange(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def test_a_tensors_range_holds_its_very_bytes(path: Path) -> None:
    ranges, data = tensor_ranges(path), path.read_bytes()
    for name, tensor in load_file(path).items():
        held = data[ranges[name].begin : ranges[name].end]
        assert held == tensor.flatten().view(torch.uint8).numpy().tobytes()
    assert set(ranges) == {"a", "b"}


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x07" + b"\0" * 7 + b'{"a":1}']
)
def test_a_broken_header_gives_no_ranges(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken").write_bytes(content)
    assert tensor_ranges(tmp_path / "broken") == {}
    assert tensor_ranges(tmp_path / "missing") == {}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (offset, length) of each range that the system was asked for."""
    found: list[tuple[int, int]] = []

    def note(_: int, offset: int, length: int, __: int) -> None:
        found.append((offset, length))

    monkeypatch.setattr(os, "posix_fadvise", note, raising=False)
    return found


def test_no_more_than_the_window_is_asked_for_before_it_is_read(
    path: Path, asked: list[tuple[int, int]]
) -> None:
    ranges = [FileRange(path, i * 10, i * 10 + 10) for i in range(8)]
    ahead = ReadAhead(ranges, window_bytes=25)
    assert asked == [(0, 10), (10, 10), (20, 10)]
    ahead.note_read(10)
    assert asked[3:] == [(30, 10)]
    for _ in range(10):
        ahead.note_read(10)
    assert asked == [(one.begin, 10) for one in ranges]


def test_a_file_that_has_gone_is_passed_over(
    tmp_path: Path, path: Path, asked: list[tuple[int, int]]
) -> None:
    ReadAhead([FileRange(tmp_path / "gone", 0, 10), FileRange(path, 0, 10)])
    assert asked == [(0, 10)]
