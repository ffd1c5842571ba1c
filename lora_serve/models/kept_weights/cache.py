"""The directory of packed weights: a file for each model, found by all that shapes its bytes.

    DIRECTORY/KEY.weights     one model's; appears by rename, when it is whole
    DIRECTORY/UUID.tmp        being written

A checkpoint is told apart by its files' names and `file_identity`. What changed just now is not
kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch
import xxhash

import lora_serve
from lora_serve.file_identity import file_identity
from lora_serve.folders.folder import Folder
from lora_serve.folders.ownership import open_own
from lora_serve.identity import framed
from lora_serve.models.kept_weights.file import (
    KeptFile,
    UnreadableFileError,
    map_kept,
    write_kept,
)
from lora_serve.models.kept_weights.reader import NotingReader
from lora_serve.observability.sizes import shown_bytes
from lora_serve.ops.kept_packing import NotAsKeptError, PackedParts

logger = logging.getLogger(__name__)

FLAG = "--weights-cache-path"
SUFFIX, UNFINISHED = ".weights", ".tmp"
STALE_SECONDS = 3600.0
ROOM_LEFT_BYTES = 2**30

_CODE = ("layers", "models", "ops")  # whose files say what is packed, and how


def open_cache(directory: Path) -> Folder:
    """Raises ConfigError where others than this user may write, or nothing can be made."""
    return open_own(directory, FLAG, "weights")


def key_of(files: Iterable[Path], facts: Iterable[str]) -> str | None:
    """What the file of a model is called; None for one that changed just now.

    Args:
        files: of its checkpoint.
        facts: all else that shapes packed weights, but the version of this software.
    """
    parts: list[bytes] = []
    for path in sorted(files):
        identity = file_identity(path.stat())
        if identity is None:
            return None
        parts.append(f"{path.resolve()} {identity}".encode())
    parts += [fact.encode() for fact in facts]
    return hashlib.sha256(framed(_software(), *parts)).hexdigest()


def _software() -> bytes:
    root = Path(lora_serve.__file__).parent
    files = [
        file for part in _CODE for kind in ("*.py", "*.so") for file in (root / part).rglob(kind)
    ]
    digest = xxhash.xxh3_128(torch.__version__.encode())
    for file in sorted(files):
        digest.update(framed(str(file.relative_to(root)).encode(), file.read_bytes()))
    return digest.digest()


class WeightsCache:
    """One directory, as one load uses it. most_bytes: of all its files together."""

    def __init__(self, folder: Folder, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def size_of(self, key: str) -> int:
        """Bytes of the file of this key; 0 if there is none."""
        with suppress(OSError):
            return self._folder.status_of(key + SUFFIX).st_size
        return 0

    def find(self, key: str, note: Callable[[int], object]) -> KeptFile:
        """Map what was kept under this key. Raises NotAsKeptError if it cannot be used."""
        name = key + SUFFIX
        try:
            with self._folder.opened(name) as descriptor:
                kept = map_kept(descriptor, key, note)
        except (UnreadableFileError, OSError) as error:
            raise NotAsKeptError(str(error)) from error
        with suppress(OSError):  # of a read-only disk nothing needs to give way
            self._folder.set_time(name, time.time())
        return kept

    def forget(self, key: str, reason: str) -> None:
        """Delete the file of this key, for a reason that is told."""
        logger.warning(
            "%s: packed weights %s%s are not used, the checkpoint is read: %s",
            FLAG,
            key,
            SUFFIX,
            reason,
        )
        with suppress(OSError):
            self._folder.unlink(key + SUFFIX)

    def keep_later(self, key: str, reader: NotingReader, packs: list[PackedParts]) -> None:
        """Write a model's weights in a thread of its own, while the model is used."""
        threading.Thread(
            target=self._keep, args=(key, reader, packs), name="weights-cache", daemon=True
        ).start()

    def _keep(self, key: str, reader: NotingReader, packs: list[PackedParts]) -> None:
        needed = sum(count for pack in packs for _, count in pack.parts)
        needed += sum(table.nbytes for table in reader.tables.values())
        name = uuid4().hex + UNFINISHED
        try:
            self._make_room(needed)
            try:
                with self._folder.opened(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                    write_kept(descriptor, key, reader.taken(), reader.tables, packs)
                self._folder.move(name, self._folder, key + SUFFIX)
            finally:
                self._folder.unlink(name)
        except OSError as error:
            logger.warning("%s: packed weights are not kept for the next start: %s", FLAG, error)
            return
        logger.info("packed weights are kept for the next start: %s", shown_bytes(needed))

    def _make_room(self, needed: int) -> None:
        """Delete what was used longest ago, so that this and the rest stay within the bounds.

        Raises OSError where there is no room.
        """
        if needed > self._most_bytes:
            raise OSError(
                f"they take {shown_bytes(needed)}, --weights-cache-bytes allows "
                f"{shown_bytes(self._most_bytes)}; raise it"
            )
        files = []
        for name in self._folder.names():
            with suppress(FileNotFoundError):  # another server has just deleted it
                status = self._folder.status_of(name)
                if name.endswith(SUFFIX):
                    files.append((status.st_mtime, status.st_size, name))
                elif name.endswith(UNFINISHED) and time.time() - status.st_mtime > STALE_SECONDS:
                    self._folder.unlink(name)
        deletable = sum(size for _, size, _ in files)
        if self._free_bytes() + deletable < needed:
            raise self._no_room(needed)  # before anything is deleted in vain
        total = needed + deletable
        for _, size, name in sorted(files):
            if total <= self._most_bytes and self._free_bytes() >= needed:
                break
            self._folder.unlink(name)
            total -= size
        if self._free_bytes() < needed:  # what a running server has mapped takes room still
            raise self._no_room(needed)

    def _no_room(self, needed: int) -> OSError:
        free = shown_bytes(self._folder.free_bytes())
        return OSError(
            f"they take {shown_bytes(needed)}, and the disk has {free}, of which "
            f"{shown_bytes(ROOM_LEFT_BYTES)} stay free; make room on it, or name a "
            "directory of another disk"
        )

    def _free_bytes(self) -> int:
        return self._folder.free_bytes() - ROOM_LEFT_BYTES
