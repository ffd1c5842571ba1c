"""The directory of the disk tier: names, descriptors, and moves that are atomic.

    PATH/namespaces/ROOT/namespace.json   what shares this KV, in words; two lines: JSON, checksum
    PATH/namespaces/ROOT/*.kv             groups of blocks (group_file.py), complete or not there
    PATH/staging/…                        files being written, by process; gone with their process
    PATH/staging/writer                   the lock for writing, and what writers have changed
    PATH/trash/…                          dropped namespaces, until they are deleted
    PATH/quarantine/…                     files that were refused; few, the newest

Everything appears and vanishes by rename, so a process that is killed, or another that works in
the same directory, leaves nothing half-done. What else lies in PATH is not touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import msgspec
import xxhash

from lora_serve.errors import ConfigError
from lora_serve.kv_tiers.base import TierNamespace
from lora_serve.kv_tiers.disk.news import DiskNews, Place, Turn, place_of

DESCRIPTOR = "namespace.json"
GROUP_SUFFIX = ".kv"
# What stays so; a disk that is full or away may be used later.
_NOT_OURS_TO_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)
BETWEEN = "-"  # a staged file's namespace and its name


def check_writable(path: Path) -> None:
    """Refuse a directory in which this process cannot make files. Makes it if it is not there.

    Raises:
        ConfigError: naming the directory.
    """
    directory = DiskDirectory(path)
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        if error.errno in _NOT_OURS_TO_WRITE:
            raise ConfigError(
                f"--kv-disk-path {path}: no file can be made there ({error.strerror}); give this "
                "user the right to write, or name another directory"
            ) from error
    finally:
        directory.close()


class DiskDirectory:
    """Methods raise OSError when the disk cannot do what they ask."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if `path` is not a directory, and cannot become one."""
        self.path = path
        self._staging: Path | None = None
        self._staging_lock = -1
        self._mutex = threading.Lock()
        self._news = DiskNews(path / "staging" / "writer")
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._itself = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(
                f"--kv-disk-path {path}: {error.strerror}; name a directory that can be made"
            ) from error

    def check_in_place(self) -> None:
        """Make the directory again if it was deleted.

        Raises OSError if its disk was unmounted, or it was moved: what is written now would go
        elsewhere, and what is forgotten now would come back with it.
        """
        itself = os.fstat(self._itself)
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), itself):
                return
        if itself.st_nlink:
            raise OSError(errno.ENODEV, "the directory of the start is not here", str(self.path))
        self.path.mkdir(parents=True, exist_ok=True)
        os.close(self._itself)
        self._itself = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    # ── namespaces ──────────────────────────────────────────────────────────────────────────

    def roots(self) -> list[bytes]:
        """The roots of all namespaces that lie here, of any process."""
        try:
            names = os.listdir(self.path / "namespaces")
        except FileNotFoundError:
            return []
        return [root for name in names if (root := _root(name)) is not None]

    def of(self, root: bytes) -> Path:
        return self.path / "namespaces" / root.hex()

    def groups(self, root: bytes) -> list[Path]:
        """The namespace's files; none if it has just been dropped."""
        return [path for path in _listed(self.of(root)) if path.suffix == GROUP_SUFFIX]

    def describe(self, root: bytes) -> TierNamespace | None:
        """What the namespace's descriptor says; None if it cannot be trusted or is not there."""
        try:
            text, _, checksum = (self.of(root) / DESCRIPTOR).read_bytes().partition(b"\n")
            if checksum.strip() != xxhash.xxh3_128_hexdigest(text).encode():
                return None
            namespace = msgspec.json.decode(text, type=TierNamespace)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None
        return namespace if namespace.root == root else None

    def ensure(self, namespace: TierNamespace) -> Path:
        """The namespace's directory, made with its descriptor if it was not there."""
        directory = self.of(namespace.root)
        if (directory / DESCRIPTOR).exists():
            return directory
        made = self.stage()
        made.mkdir()
        text = msgspec.json.encode(namespace)
        checksum = xxhash.xxh3_128_hexdigest(text).encode()
        with (made / DESCRIPTOR).open("wb", buffering=0) as file:
            file.write(text + b"\n" + checksum + b"\n")
            os.fsync(file.fileno())  # without it, synced groups would be lost with the power
        directory.parent.mkdir(exist_ok=True)
        try:
            made.rename(directory)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return directory

    def trash(self, root: bytes) -> None:
        """Make a namespace vanish at once; `empty_trash` frees its bytes."""
        (self.path / "trash").mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another process took it
            self.of(root).rename(self.path / "trash" / uuid4().hex)
            self._news.tell(Place(root))

    def sync_trash(self) -> None:
        """Sync what `trash` has moved, so that no power failure undoes it."""
        for directory in (self.path / "namespaces", self.path / "trash"):
            with suppress(FileNotFoundError):
                _sync(directory)

    def empty_trash(self) -> None:
        for entry in _listed(self.path / "trash"):
            shutil.rmtree(entry, ignore_errors=True)  # another process may be at it too

    # ── files ───────────────────────────────────────────────────────────────────────────────

    def stage(self) -> Path:
        """A new path for something that is not complete yet, on the same disk."""
        with self._mutex:
            if self._staging is None or not self._staging.is_dir():
                self._open_staging()
            assert self._staging is not None, "just opened"
            return self._staging / uuid4().hex

    def writers_turn(self) -> AbstractContextManager[Turn]:
        """Hold the lock under which one process at a time makes room and reserves it."""
        return self._news.turn()

    def reserve(self, place: Place, num_bytes: int) -> Path:
        """Stage a file that counts with this size from now on, whatever is written to it."""
        staged = self.stage().with_name(f"{place.root.hex()}{BETWEEN}{place.name}")
        try:
            with staged.open("xb") as file:
                file.truncate(num_bytes)
        except OSError:
            staged.unlink(missing_ok=True)
            raise
        return staged

    def reserved_elsewhere(self) -> dict[Place, int]:
        """Bytes reserved by other processes, also by killed ones, by the file they are for."""
        with self._mutex:
            own = self._staging
        directories = [entry for entry in _listed(self.path / "staging") if entry != own]
        files = [file for entry in directories if entry.is_dir() for file in _listed(entry)]
        return {place: _size(file) for file in files if (place := _place(file.name))}

    def quarantine(self, group: Path, max_files: int, max_bytes: int) -> bool:
        """Move a file aside for an operator to look at; only the newest are kept.

        Returns False if another process has done so.
        """
        place = self.path / "quarantine"
        place.mkdir(exist_ok=True)
        try:
            group.rename(place / f"{group.parent.name[:16]}-{group.name}")
        except FileNotFoundError:
            return False
        kept_bytes = 0
        for i, file in enumerate(sorted(_listed(place), key=_mtime, reverse=True)):
            kept_bytes += _size(file)
            if i >= max_files or kept_bytes > max_bytes:
                file.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        with self._mutex:
            if self._staging is not None:
                shutil.rmtree(self._staging, ignore_errors=True)
                os.close(self._staging_lock)
                self._staging = None
            if self._itself >= 0:
                os.close(self._itself)
                self._itself = -1

    def sweep(self) -> None:
        """Delete what killed processes left: their staging directories, and trash."""
        if (self.path / "staging").is_dir():
            with self._staging_turn():
                for entry in _listed(self.path / "staging"):
                    if entry.is_dir() and _is_abandoned(entry):
                        shutil.rmtree(entry, ignore_errors=True)
        self.empty_trash()

    def _open_staging(self) -> None:
        """Make a directory of this process's own; its lock is held as long as the process lives."""
        if self._staging is not None:
            os.close(self._staging_lock)
        (self.path / "staging").mkdir(exist_ok=True)
        with self._staging_turn():
            staging = self.path / "staging" / uuid4().hex
            staging.mkdir()
            self._staging_lock = os.open(staging / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._staging_lock, fcntl.LOCK_EX)
            self._staging = staging

    @contextmanager
    def _staging_turn(self) -> Iterator[None]:
        """Hold the lock under which one process at a time makes or sweeps staging directories."""
        with (self.path / "staging" / "turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            yield


def _is_abandoned(staging: Path) -> bool:
    try:
        with (staging / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return True


def _place(staged: str) -> Place | None:
    """The file that a staged file is to become; None if it is no group of blocks."""
    root, _, name = staged.partition(BETWEEN)
    return place_of(root, name) if name else None


def _root(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mtime(path: Path) -> float:
    with suppress(FileNotFoundError):  # another process took it
        return path.stat().st_mtime
    return 0.0


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # another process took it
        return path.stat().st_size
    return 0
