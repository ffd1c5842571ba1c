"""The directory of the disk tier: names, descriptors, and moves that are atomic.

    PATH/namespaces/ROOT/namespace.json   what shares this KV, in words; two lines: JSON, checksum
    PATH/namespaces/ROOT/*.kv             groups of blocks (group_file.py), complete or not there
    PATH/staging/…                        files being written, by process; gone with their process
    PATH/staging/writer                   the lock for writing, and what writers have changed
    PATH/trash/…                          dropped namespaces, until they are deleted
    PATH/quarantine/…                     files that were refused; few, the newest

Everything appears and vanishes by rename, so a process that is killed, or another that works in
the same directory, leaves nothing half-done. What else lies in PATH is not touched. PATH is opened
once, and all below it is reached from there without following a link (folder.py).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from uuid import uuid4

import msgspec
import xxhash

from lora_serve.errors import ConfigError
from lora_serve.folders.folder import Folder
from lora_serve.folders.ownership import open_own, open_to_inspect
from lora_serve.kv_tiers.base import TierNamespace
from lora_serve.kv_tiers.disk.change_log import ChangeLog, Place, Turn, place_of
from lora_serve.kv_tiers.disk.group_file import write_all
from lora_serve.kv_tiers.disk.staging import Staged, Staging

DESCRIPTOR = "namespace.json"
GROUP_SUFFIX = ".kv"
# What stays so; a disk that is full or away may be used later.
_NOT_OURS_TO_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)
BETWEEN = "-"  # a staged file's namespace and its name
MAX_DESCRIPTOR_BYTES = 2**16


def check_writable(path: Path) -> None:
    """Refuse a directory in which this process cannot make files. Makes it if it is not there.

    Raises:
        ConfigError: naming the directory.
    """
    directory = DiskDirectory(path)
    try:
        directory.make_and_delete_a_file()
    except OSError as error:
        if error.errno in _NOT_OURS_TO_WRITE:
            raise ConfigError(
                f"--kv-disk-path {path}: no file can be made there ({error.strerror}); give this "
                "user the right to write, or name another directory"
            ) from error
    finally:
        directory.close()


def _open_own(path: Path) -> Folder:
    return open_own(path, "--kv-disk-path", "KV")


class DiskDirectory:
    """Methods raise OSError when the disk cannot do what they ask."""

    def __init__(self, path: Path, *, is_inspected: bool = False) -> None:
        """Open `path`, and make it if it is not there.

        is_inspected: whether it may be any user's, and must be there.

        Raises:
            ConfigError: it is not a directory and cannot become one, or others may write to it.
        """
        self.path = path
        self._itself = open_to_inspect(path) if is_inspected else _open_own(path)
        self._staging = Staging(self._folder)
        self._change_log = ChangeLog(self._folder)

    def check_in_place(self) -> None:
        """Make the directory again if it was deleted.

        Raises OSError if its disk was unmounted, or it was moved: what is written now would go
        elsewhere, and what is forgotten now would come back with it.
        """
        itself = self._itself.status()
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), itself):
                return
        if itself.st_nlink:
            raise OSError(errno.ENODEV, "the directory of the start is not here", str(self.path))
        try:
            self._itself.replace(_open_own(self.path))
        except ConfigError as error:
            raise OSError(errno.EPERM, str(error)) from error

    def make_and_delete_a_file(self) -> None:
        name = uuid4().hex
        with self._itself.opened(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
            self._itself.unlink(name)

    # ── namespaces ──────────────────────────────────────────────────────────────────────────

    def roots(self) -> list[bytes]:
        """The roots of all namespaces that lie here, of any process."""
        return [root for name in self._names("namespaces") if (root := _root(name)) is not None]

    def of(self, root: bytes) -> Folder:
        """The namespace's directory. Raises FileNotFoundError if there is none."""
        with self._folder("namespaces") as namespaces:
            return namespaces.folder(root.hex())

    def groups(self, root: bytes) -> list[str]:
        """Names of the namespace's files; none if it has just been dropped."""
        try:
            with self.of(root) as folder:
                return [name for name in folder.names() if name.endswith(GROUP_SUFFIX)]
        except FileNotFoundError:
            return []

    def describe(self, root: bytes) -> TierNamespace | None:
        """What the namespace's descriptor says; None if it cannot be trusted or is not there."""
        namespace = _namespace(self._description(root))
        return namespace if namespace is not None and namespace.root == root else None

    def is_of_another_version(self, root: bytes) -> bool:
        """Whether its descriptor is whole, and says what this version of ours cannot read."""
        text = self._description(root)
        return bool(text) and _namespace(text) is None

    def _description(self, root: bytes) -> bytes:
        """The descriptor's text; b"" if it is damaged, no regular file, or not there."""
        with suppress(FileNotFoundError, NotADirectoryError), self.of(root) as folder:
            if not folder.has_file(DESCRIPTOR):
                return b""
            with folder.opened(DESCRIPTOR) as descriptor:
                text, _, checksum = os.read(descriptor, MAX_DESCRIPTOR_BYTES).partition(b"\n")
            if checksum.strip() == xxhash.xxh3_128_hexdigest(text).encode():
                return text
        return b""

    def ensure(self, namespace: TierNamespace) -> Folder:
        """The namespace's directory, made with its descriptor if it was not there."""
        found = self._described(namespace.root)
        if found is not None:
            return found
        made = uuid4().hex
        staging = self._staging.folder()
        try:
            with staging.make_folder(made) as folder:
                _write_descriptor(folder, namespace)
            with self._folder("namespaces", make=True) as namespaces:
                try:
                    staging.move(made, namespaces, namespace.root.hex())
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                return namespaces.folder(namespace.root.hex())
        finally:
            staging.remove_tree(made)  # unless it was moved, it would stay as long as this process

    def trash(self, root: bytes) -> None:
        """Make a namespace vanish at once; `empty_trash` frees its bytes."""
        with self._folder("trash", make=True) as trash, suppress(FileNotFoundError):
            with self._folder("namespaces") as namespaces:
                namespaces.move(root.hex(), trash, uuid4().hex)
            self._change_log.tell(Place(root))

    def sync_trash(self) -> None:
        """Sync what `trash` has moved, so that no power failure undoes it."""
        for name in ("namespaces", "trash"):
            with suppress(FileNotFoundError), self._folder(name) as folder:
                folder.sync()

    def empty_trash(self) -> None:
        with suppress(FileNotFoundError), self._folder("trash") as trash:
            for name in trash.names():
                trash.remove_tree(name)

    # ── files ───────────────────────────────────────────────────────────────────────────────

    def writers_turn(self) -> AbstractContextManager[Turn]:
        """Hold the lock under which one process at a time makes room and reserves it."""
        return self._change_log.turn()

    def reserve(self, place: Place, num_bytes: int) -> Staged:
        """Stage a file that counts with this size from now on, whatever is written to it."""
        return self._staging.reserve(f"{place.root.hex()}{BETWEEN}{place.name}", num_bytes)

    def publish(self, staged: Staged, namespace: TierNamespace, name: str) -> None:
        """Let a staged file that is complete be found, under this name."""
        with self.ensure(namespace) as folder:
            staged.move(folder, name)

    def reserved_elsewhere(self) -> dict[Place, int]:
        """Bytes reserved by other processes, also by killed ones, by the file they are for."""
        sizes = self._staging.sizes_elsewhere()
        return {place: size for name, size in sizes if (place := _place(name))}

    def quarantine(self, root: bytes, name: str, max_files: int, max_bytes: int) -> bool:
        """Move a file aside for an operator to look at; only the newest are kept.

        Returns False if another process has done so.
        """
        with self._folder("quarantine", make=True) as aside:
            try:
                with self.of(root) as folder:
                    folder.move(name, aside, f"{root.hex()[:16]}-{name}")
            except FileNotFoundError:
                return False
            kept_bytes = 0
            newest_first = sorted(_statuses(aside), key=lambda one: one[1].st_mtime, reverse=True)
            for i, (other, status) in enumerate(newest_first):
                kept_bytes += status.st_size
                if i >= max_files or kept_bytes > max_bytes:
                    aside.unlink(other)
        return True

    def quarantined_bytes(self) -> list[int]:
        """Sizes of the files set aside."""
        with suppress(FileNotFoundError), self._folder("quarantine") as aside:
            found = _statuses(aside)
            return [status.st_size for name, status in found if name.endswith(GROUP_SUFFIX)]
        return []

    def empty_quarantine(self) -> None:
        with suppress(FileNotFoundError), self._folder("quarantine") as aside:
            for name in aside.names():
                if name.endswith(GROUP_SUFFIX):
                    aside.unlink(name)

    def free_bytes(self) -> int:
        return self._itself.free_bytes()

    def close(self) -> None:
        self._staging.close()
        self._itself.close()

    def sweep(self) -> None:
        """Delete what killed processes left: their staging directories, and trash."""
        self._staging.sweep()
        self.empty_trash()

    def _folder(self, name: str, *, make: bool = False) -> Folder:
        """One of PATH's directories. Raises FileNotFoundError if it is not to be made."""
        folder = self._itself.make_folder(name) if make else self._itself.folder(name)
        folder.hide()
        return folder

    def _described(self, root: bytes) -> Folder | None:
        """The namespace's directory, if it has a descriptor.

        Raises OSError where that is a link or a pipe: what is saved there would never be found.
        """
        with suppress(FileNotFoundError), ExitStack() as stack:
            folder = stack.enter_context(self.of(root))
            if not stat.S_ISREG(folder.status_of(DESCRIPTOR).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", f"{root.hex()}/{DESCRIPTOR}")
            stack.pop_all()
            return folder
        return None

    def _names(self, name: str) -> list[str]:
        with suppress(FileNotFoundError), self._folder(name) as folder:
            return folder.names()
        return []


def _write_descriptor(folder: Folder, namespace: TierNamespace) -> None:
    text = msgspec.json.encode(namespace)
    checksum = xxhash.xxh3_128_hexdigest(text).encode()
    with folder.opened(DESCRIPTOR, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        write_all(descriptor, [text, b"\n", checksum, b"\n"])
        os.fsync(descriptor)  # without it, synced groups would be lost with the power


def _namespace(description: bytes) -> TierNamespace | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(description, type=TierNamespace)
    return None


def _place(staged: str) -> Place | None:
    """The file that a staged file is to become; None if it is no group of blocks."""
    root, _, name = staged.partition(BETWEEN)
    return place_of(root, name) if name else None


def _root(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def _statuses(folder: Folder) -> Iterator[tuple[str, os.stat_result]]:
    for name in folder.names():
        with suppress(FileNotFoundError):  # another process took it
            yield name, folder.status_of(name)
