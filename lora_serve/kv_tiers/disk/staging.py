"""Where files are written before they are complete: a directory for each process.

PATH/staging/ID/lock    held as long as the process lives; who can take it may delete ID
PATH/staging/ID/…       what the process is writing
PATH/staging/turn       whose turn it is to make or sweep such directories
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from uuid import uuid4

from lora_serve.folders.folder import Folder, OpenFolder
from lora_serve.kv_tiers.disk.change_log import STAGING


class Staged:
    """A file being written, through `descriptor`. A context: it is gone after it, unless moved."""

    def __init__(self, folder: Folder, name: str, num_bytes: int) -> None:
        self._folder = folder
        self._name = name
        self.descriptor = folder.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(self.descriptor, num_bytes)
        except OSError:
            self._discard()
            raise

    def move(self, into: Folder, name: str) -> None:
        self._folder.move(self._name, into, name)
        self._name = ""

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._discard()

    def _discard(self) -> None:
        try:
            os.close(self.descriptor)  # may say only now that the disk could not write
        finally:
            if self._name:
                self._folder.unlink(self._name)


class Staging:
    """This process's directory, made when it is first needed; and a look at the others'."""

    def __init__(self, open_folder: OpenFolder) -> None:
        """`open_folder` gives directories of PATH."""
        self._open_folder = open_folder
        self._mutex = threading.Lock()
        self._name = ""
        self._own: Folder | None = None
        self._lock = -1

    def folder(self) -> Folder:
        """Its own directory, which it keeps open."""
        with self._mutex:
            if self._own is None or not self._own.status().st_nlink:  # it has been deleted
                self._make()
            assert self._own is not None, "just made"
            return self._own

    def reserve(self, name: str, num_bytes: int) -> Staged:
        return Staged(self.folder(), name, num_bytes)

    def sizes_elsewhere(self) -> list[tuple[str, int]]:
        """Names and sizes of what other processes are writing, and of what killed ones were."""
        with self._mutex:
            own = self._name
        found: list[tuple[str, int]] = []
        with suppress(FileNotFoundError), self._open_folder(STAGING) as staging:
            for name in staging.names():
                with (
                    suppress(FileNotFoundError, NotADirectoryError),
                    staging.folder(name) as folder,
                ):
                    found += _sizes(folder) if name != own else ()
        return found

    def sweep(self) -> None:
        """Delete what killed processes left."""
        with suppress(FileNotFoundError), self._open_folder(STAGING) as staging, _turn(staging):
            for name in staging.names():
                if _is_abandoned(staging, name):
                    staging.remove_tree(name)

    def close(self) -> None:
        with self._mutex:
            if self._own is None:
                return
            self._release()
            with suppress(FileNotFoundError), self._open_folder(STAGING) as staging:
                staging.remove_tree(self._name)

    def _make(self) -> None:
        if self._own is not None:
            self._release()
        with self._open_folder(STAGING, make=True) as staging, _turn(staging):
            self._name = uuid4().hex
            self._own = staging.make_folder(self._name)
            self._lock = self._own.open_file("lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def _release(self) -> None:
        if self._own is not None:
            self._own.close()
            os.close(self._lock)
            self._own = None


@contextmanager
def _turn(staging: Folder) -> Iterator[None]:
    """Hold the lock under which one process at a time makes or sweeps directories."""
    with staging.opened("turn", os.O_WRONLY | os.O_CREAT) as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def _is_abandoned(staging: Folder, name: str) -> bool:
    try:
        with staging.folder(name) as folder, folder.opened("lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, NotADirectoryError):
        return False
    except FileNotFoundError:
        return True
    return True


def _sizes(folder: Folder) -> Iterator[tuple[str, int]]:
    for name in folder.names():
        with suppress(FileNotFoundError):  # complete now, or given up
            yield name, folder.status_of(name).st_size
