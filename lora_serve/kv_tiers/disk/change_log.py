"""What the writers of one directory announce to each other: where to look again.

    PATH/staging/writer    the edition, a random word; then a line a change: ROOT NAME, or ROOT

A process has its turn while it holds the lock on that file. Each remembers how far it has read, so
a turn costs what others have changed since its last one. These are hints: where one may have been
lost, by a kill or a full disk, a new edition begins, and each process looks at the whole directory
once.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from lora_serve.folders.folder import OpenFolder

STAGING = "staging"  # the directory that files are written in, and its lock lies in
WRITER = "writer"
EDITION_BYTES = 33
MAX_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Place:
    """A file of a namespace, or, without a name, all of them."""

    root: bytes
    name: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """changes: what others have changed since this process's last turn; None if that is not known.

    tell: what this process has changed in its turn, or is about to; once.
    """

    changes: Sequence[Place] | None
    tell: Callable[[Sequence[Place]], None]


class ChangeLog:
    """One process's part in the log."""

    def __init__(self, open_folder: OpenFolder) -> None:
        """`open_folder` gives directories of PATH."""
        self._open_folder = open_folder
        self._edition = b""
        self._read_to = 0

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Hold the lock: one process at a time has its turn."""
        with self._opened(os.O_RDWR | os.O_CREAT, make=True) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield Turn(self._read(file), partial(self._write, file))
            except BaseException:
                self._edition = b""  # what became of the changes is not known
                raise

    def tell(self, place: Place) -> None:
        """Write outside of a turn, so that a process that hangs in its turn blocks no other."""
        with suppress(OSError), self._opened(os.O_RDWR) as file:
            file.write(_line(place))

    @contextmanager
    def _opened(self, flags: int, *, make: bool = False) -> Iterator[io.FileIO]:
        with (
            self._open_folder(STAGING, make=make) as staging,
            io.FileIO(staging.open_file(WRITER, flags | os.O_APPEND), "a+b") as file,
        ):
            yield file

    def _read(self, file: io.FileIO) -> list[Place] | None:
        file.seek(0)
        edition = file.read(EDITION_BYTES)
        is_known = edition == self._edition != b""
        self._edition = edition if edition.find(b"\n") == EDITION_BYTES - 1 else b""
        file.seek(self._read_to if is_known else EDITION_BYTES)
        text = file.read()
        self._read_to = file.tell()
        places = [_place(line) for line in text.splitlines() if line]
        is_whole = None not in places and text[:1] in (b"", b"\n")
        return [place for place in places if place] if is_known and is_whole else None

    def _write(self, file: io.FileIO, changes: Sequence[Place]) -> None:
        is_all_read = file.seek(0, os.SEEK_END) == self._read_to
        text = b"".join(map(_line, changes))
        try:
            if not self._edition or file.tell() > MAX_BYTES:
                file.truncate(0)
                self._edition = uuid4().hex.encode() + b"\n"
                text, is_all_read = self._edition + text, True
            if file.write(text) < len(text):
                file.truncate(0)
        except OSError:  # the disk is full: but to cut off needs no room
            file.truncate(0)
        if is_all_read:
            self._read_to = file.tell()


def place_of(root: str, name: str) -> Place | None:
    """The place of a root and a file name; None if they cannot be such."""
    with suppress(ValueError):
        if (place := Place(bytes.fromhex(root), name)).root and "/" not in name:
            return place
    return None


def _line(place: Place) -> bytes:
    """Write a line behind an end of line, because what was written before may have been cut off."""
    return f"\n{place.root.hex()} {place.name}\n".encode()


def _place(line: bytes) -> Place | None:
    """Parse a line; None if it is not whole."""
    root, separator, name = line.decode("ascii", "replace").partition(" ")
    return place_of(root, name) if separator else None
