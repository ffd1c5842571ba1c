"""An adapter's directory, held open while its files are read: all of them come from one place.

With allowed roots, each file is reached from a root's descriptor by steps that follow no link.
Links are resolved before, by name; if one leads elsewhere by the time of the steps, they fail. So
whatever is swapped meanwhile, nothing outside of the roots is opened. Knows nothing of formats.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from lora_serve.errors import AdapterError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# Never wait for a pipe's writer, nor become the terminal's process.
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class _ReadFile(io.FileIO):
    """A file that has bytes to read now, or an error: one below /proc may have none, and no end."""

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        num_read = super().readinto(buffer)
        if num_read is None:
            raise BlockingIOError(errno.EAGAIN, "it is no file of a disk: it waits for bytes")
        return num_read


class AdapterDirectory:
    """path: what it is called in messages. Open as long as the context of `open_directory`."""

    def __init__(self, path: str, descriptor: int, allowed_roots: Sequence[str]) -> None:
        self.path = path
        self._descriptor = descriptor
        self._allowed_roots = allowed_roots

    def open_file(self, name: str) -> BinaryIO:
        """Open a file for reading, never a pipe or device that could block or never end.

        Raises:
            OSError: as open() does. AdapterError: it is no regular file, or a link that leads out
                of the allowed roots.
        """
        descriptor = self._open_beneath(name) if self._allowed_roots else self._open(name)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise AdapterError(f"{os.path.join(self.path, name)} is not a regular file")
        return io.BufferedReader(_ReadFile(descriptor))

    def has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _open(self, name: str) -> int:
        return os.open(name, _FILE, dir_fd=self._descriptor)

    def _open_beneath(self, name: str) -> int:
        try:
            return os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        directory, linked_name = os.path.split(os.path.realpath(os.path.join(self.path, name)))
        with _walked(directory, self.path, self._allowed_roots) as parent:
            return _unless_swapped(self.path, linked_name, _FILE, parent)


@contextmanager
def open_directory(path: str, allowed_roots: Sequence[str] = ()) -> Iterator[AdapterDirectory]:
    """The directory at `path`; below one of `allowed_roots`, if there are any.

    Raises:
        OSError: as open() does. ValueError: no file can have this path.
        AdapterError: it does not lie below one of the roots.
    """
    if allowed_roots:
        with _walked(os.path.realpath(path), path, allowed_roots) as descriptor:
            yield AdapterDirectory(path, descriptor, allowed_roots)
        return
    descriptor = os.open(path, _DIRECTORY)
    try:
        yield AdapterDirectory(path, descriptor, ())
    finally:
        os.close(descriptor)


def root_of(real: str, allowed_roots: Sequence[str]) -> str | None:
    """The real path of the first root below which a real path lies, by its name alone."""
    roots = (os.path.realpath(os.path.expanduser(root)) for root in allowed_roots)
    return next((root for root in roots if os.path.commonpath((real, root)) == root), None)


def outside(path: str, allowed_roots: Sequence[str]) -> AdapterError:
    return AdapterError(
        f"{path} does not lie below --lora-allowed-roots ({', '.join(allowed_roots)})"
    )


@contextmanager
def _walked(real: str, path: str, allowed_roots: Sequence[str]) -> Iterator[int]:
    """A descriptor of the directory `real`, reached from its root without following a link."""
    root = root_of(real, allowed_roots)
    if root is None:
        raise outside(path, allowed_roots)
    descriptor = os.open(root, _DIRECTORY)
    try:
        for name in os.path.relpath(real, root).split(os.sep):
            below = _unless_swapped(path, name, _DIRECTORY, descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _unless_swapped(path: str, name: str, flags: int, parent: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
    raise AdapterError(f"{path}: {name} was replaced while it was opened; load it again")
