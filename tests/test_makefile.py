"""`make install`, with a Python that installs nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTES_THAT_IT_RAN = """#!/bin/sh
echo "$0 $*" >> calls
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the target looks at, with two modules."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "CMakeLists.txt", "requirements/cpu.lock", ".venv/bin/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("python", "pip"):
        (tmp_path / ".venv/bin" / name).write_text(NOTES_THAT_IT_RAN)
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    (tmp_path / "lora_serve/kv").mkdir(parents=True)
    for name in ("a.py", "kv/b.py"):
        (tmp_path / "lora_serve" / name).touch()
    return tmp_path


def installs(tree: Path) -> bool:
    """Whether `make install` installs the package."""
    calls = tree / "calls"
    calls.write_text("")
    subprocess.run(["make", "install"], cwd=tree, check=True, capture_output=True)
    return "--editable" in calls.read_text()


def test_an_install_is_made_again_when_modules_come_go_or_move_and_not_otherwise(
    tree: Path,
) -> None:
    assert installs(tree)
    assert not installs(tree)
    (tree / "lora_serve/kv/b.py").write_text("changed = True")
    assert not installs(tree)
    (tree / "lora_serve/kv/b.py").rename(tree / "lora_serve/b.py")
    assert installs(tree)
    (tree / "lora_serve/b.py").unlink()
    assert installs(tree)
    (tree / "lora_serve/kv/c.py").touch()
    assert installs(tree)
    assert not installs(tree)
