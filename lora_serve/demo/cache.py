"""A directory that is made once and kept, and is always whole or absent.

It is built beside its final place and renamed into it, under a lock that the system drops with its
holder. A directory that differs from its manifest of digests is damaged, and is made again.
Knows nothing of models.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MANIFEST = "manifest.json"


def cache_root() -> Path:
    """Where lora-serve may keep what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lora-serve"


def build_once(
    directory: Path, build: Callable[[Path], None], progress: Callable[[str], None]
) -> None:
    """Make sure that `directory` is there and whole; `build` fills an empty one if it is not."""
    if is_whole(directory):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f"{directory.name}.lock"), progress):
        if is_whole(directory):
            return
        _remove_remains(directory)
        building = Path(tempfile.mkdtemp(prefix=f"{directory.name}.tmp-", dir=directory.parent))
        try:
            build(building)
            _write_manifest(building)
            building.chmod(0o755)
            building.rename(directory)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def is_whole(directory: Path) -> bool:
    """Whether every file that was built is there with the bytes that it was built with."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        return bool(manifest) and all(
            _digest(directory / name) == digest for name, digest in manifest.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest = {path.relative_to(directory).as_posix(): _digest(path) for path in files}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _remove_remains(directory: Path) -> None:
    """Drop a damaged directory, and what builders left behind that were killed."""
    for path in directory.parent.glob(f"{directory.name}.tmp-*"):
        shutil.rmtree(path)
    if directory.exists():
        shutil.rmtree(directory)


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the lock goes with the file, also when the process dies
