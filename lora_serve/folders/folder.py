"""A directory that is held open: what lies in it is reached by name from its descriptor.

No link is followed, whatever a name has become meanwhile, so another user who could plant one
redirects nothing. What is made here is for its owner alone, whatever the umask.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # of a pipe, opening would wait


class Folder:
    """A context manager that closes it. Names have no slash. Methods raise OSError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def at(cls, path: Path) -> Folder:
        """The directory at `path`, wherever links on the way lead."""
        return cls(os.open(path, _DIRECTORY))

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # ── itself ──────────────────────────────────────────────────────────────────────────────

    def status(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def names(self) -> list[str]:
        return os.listdir(self._descriptor)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def free_bytes(self) -> int:
        found = os.statvfs(self._descriptor)
        return found.f_bavail * found.f_frsize

    def hide(self) -> None:
        """Keep all others out, if it is ours."""
        status = self.status()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != PRIVATE_DIRECTORY:
            with suppress(OSError):  # a read-only disk still gives what it has
                os.fchmod(self._descriptor, PRIVATE_DIRECTORY)

    def replace(self, other: Folder) -> None:
        """Become `other`, at once for every thread; it is closed."""
        os.dup2(other._descriptor, self._descriptor, inheritable=False)
        other.close()

    # ── what lies in it ─────────────────────────────────────────────────────────────────────

    def folder(self, name: str) -> Folder:
        """Raises NotADirectoryError for a link."""
        return Folder(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._descriptor))

    def make_folder(self, name: str) -> Folder:
        """The directory of that name, made if it is not there."""
        with suppress(FileExistsError):
            os.mkdir(name, PRIVATE_DIRECTORY, dir_fd=self._descriptor)
        return self.folder(name)

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A regular file's descriptor. With O_CREAT in `flags` it is made if it is not there."""
        descriptor = os.open(name, flags | _FILE, PRIVATE_FILE, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is not a regular file", name)
        return descriptor

    @contextmanager
    def opened(self, name: str, flags: int = os.O_RDONLY) -> Iterator[int]:
        """A descriptor as `open_file` gives it, closed when the block ends."""
        descriptor = self.open_file(name, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def status_of(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def has_file(self, name: str) -> bool:
        try:
            return stat.S_ISREG(self.status_of(name).st_mode)
        except FileNotFoundError:
            return False

    def set_time(self, name: str, seconds: float) -> None:
        os.utime(name, (seconds, seconds), dir_fd=self._descriptor, follow_symlinks=False)

    def move(self, name: str, into: Folder, as_name: str) -> None:
        os.rename(name, as_name, src_dir_fd=self._descriptor, dst_dir_fd=into._descriptor)

    def unlink(self, name: str) -> bool:
        """Delete a file; False if it is gone already."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)
            return True
        return False

    def remove_tree(self, name: str) -> None:
        """Delete as much of a directory as can be; another process may be at it, too."""
        shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)


class OpenFolder(Protocol):
    """Opens a directory by name; with `make` it is made if it is not there."""

    def __call__(self, name: str, *, make: bool = False) -> Folder: ...
