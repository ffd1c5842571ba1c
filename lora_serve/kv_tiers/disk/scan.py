"""Keeps the index true to the directory: all of it at start, then what other processes change.

One thread of its own does the slow part; a reader that misses looks into one namespace at once.
A namespace's directory changes its time of modification with every file that comes or goes, so
looking costs one call while nothing happens.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from lora_serve.kv_tiers.base import Cause, TierNamespace
from lora_serve.kv_tiers.disk.change_log import Place
from lora_serve.kv_tiers.disk.directory import DESCRIPTOR, GROUP_SUFFIX, DiskDirectory
from lora_serve.kv_tiers.disk.group_file import GroupTable, RefusedGroupError, read_table
from lora_serve.kv_tiers.disk.index import DiskIndex, Group

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 0.1  # a namespace is looked into at most this often for readers that miss
MTIME_GRAIN_NS = 50_000_000  # changes this close together may leave the same time behind
# Why a file may be unreadable for a moment only; with other reasons it is not tried again.
_PASSING = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)
POLL_SHARE = 50  # polling takes at most one part in so many of a core


class DiskScan:
    """`refuse(root, name, cause)` is called for each file that is no whole group of its namespace.

    What another version of the software wrote is not refused, nor found: it counts for the bound,
    and is evicted when it is the least recently used.
    """

    def __init__(
        self,
        directory: DiskDirectory,
        index: DiskIndex,
        refuse: Callable[[bytes, str, Cause], None],
        poll_seconds: float,
        look_again_seconds: float = LOOK_AGAIN_SECONDS,
    ) -> None:
        self._directory = directory
        self._index = index
        self._refuse = refuse
        self._poll_seconds = poll_seconds
        self._look_again_seconds = look_again_seconds
        self._lock = threading.Lock()  # one look at a time
        self._seen: dict[bytes, int] = {}  # root: its directory's st_mtime_ns when looked into
        self._looked: dict[bytes, float] = {}
        self._retired: set[bytes] = set()
        self._is_complete = threading.Event()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-disk-scan", daemon=True)
        self._thread.start()

    def may_find(self, root: bytes) -> bool:
        """Whether a namespace has yet to be looked into since the start."""
        return not self._is_complete.is_set() and root not in self._seen

    def wait_until_complete(self) -> None:
        self._is_complete.wait()

    def look_again(self, root: bytes) -> bool:
        """Look for other processes' new files of a namespace; False if that was done just now.

        Waits for the thread if it is looking, and then takes what it found.
        """
        now = time.monotonic()
        if root in self._seen and now - self._looked.get(root, 0.0) < self._look_again_seconds:
            return False
        self._looked[root] = now
        self._look(root)
        return True

    def look_everywhere(self) -> None:
        """Bring the index up to date with the whole directory."""
        roots = self._directory.roots()
        for root in set(self._index.roots()) - set(roots):
            self._forget(root)
        for root in roots:
            if self._is_closed:
                return
            self._guarded(partial(self._look, root))

    def look_at(self, places: Iterable[Place]) -> None:
        """Bring the index up to date with these places alone."""
        for place in places:
            if self._is_closed:
                return
            self._guarded(partial(self._look_at, place))

    def empty_trash_soon(self) -> None:
        self._wake.set()

    def retire(self, root: bytes) -> None:
        """Remove the directory of a namespace without files at the next turn."""
        with self._lock:
            self._retired.add(root)

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        self._thread.join(timeout=5.0)

    # ── the thread ──────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._guarded(self._directory.sweep)
            self._guarded(self._poll)
            self._guarded(self._index.sort)
        finally:
            self._is_complete.set()  # saves and drops wait for it, whatever has failed
        took = 0.0
        while True:
            self._wake.wait(max(self._poll_seconds, POLL_SHARE * took))
            self._wake.clear()
            if self._is_closed:
                return
            start = time.monotonic()
            self._guarded(self._poll)
            self._guarded(self._directory.empty_trash)
            took = time.monotonic() - start

    def _guarded(self, act: Callable[[], object]) -> None:
        """Run one act; a file that cannot be read, or a bug, ends the act and not the thread."""
        try:
            act()
        except OSError as error:
            logger.debug("reading %s: %s", self._directory.path, error)
        except Exception:  # saves wait for this thread
            logger.exception("reading %s failed", self._directory.path)

    def _poll(self) -> None:
        self.look_everywhere()
        self._remove_retired()

    def _remove_retired(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, set()
        for root in retired:
            if not self._index.file_names(root):
                self._directory.trash(root)

    def _look(self, root: bytes) -> None:
        """Bring the index up to date with one directory."""
        with self._lock:
            try:
                with self._directory.of(root) as folder:
                    modified = folder.status().st_mtime_ns
            except FileNotFoundError:
                self._forget(root)
                return
            if self._seen.get(root) == modified:
                return
            known = self._index.file_names(root)
            found = set(self._directory.groups(root))
            for name in known - found:
                self._index.remove_file(root, name)
            is_settled = self._add(root, found - known)
            is_settled &= time.time_ns() - modified > MTIME_GRAIN_NS
            self._seen[root] = modified if is_settled else 0

    def _look_at(self, place: Place) -> None:
        if not place.name:
            with self._lock:
                self._seen.pop(place.root, None)
            self._look(place.root)
            return
        with self._lock:
            is_there = self._is_there(place)
            is_known = self._index.knows(place.root, place.name)
            if is_known and not is_there:
                self._index.remove_file(place.root, place.name)
            elif is_there and not is_known and not self._add(place.root, {place.name}):
                self._seen.pop(place.root, None)

    def _is_there(self, place: Place) -> bool:
        with suppress(FileNotFoundError), self._directory.of(place.root) as folder:
            return place.name.endswith(GROUP_SUFFIX) and folder.has_file(place.name)
        return False

    def _add(self, root: bytes, names: set[str]) -> bool:
        """Take files into the index; False if some of them shall be looked at again."""
        namespace = self._directory.describe(root)
        if namespace is not None:
            unread = [name for name in names if not self._add_file(namespace, name)]
            return not unread
        if not self._directory.is_of_another_version(root):
            for name in names:
                self._refuse(root, name, Cause.FOREIGN)
            logger.warning(
                "%s/namespaces/%s has no %s that can be trusted, and is deleted",
                *(self._directory.path, root.hex(), DESCRIPTOR),
            )
            self._directory.trash(root)  # it could never be dropped by name
        return True

    def _add_file(self, namespace: TierNamespace, name: str) -> bool:
        """Take a file into the index; False if it could not be read and may be later."""
        try:
            with (
                self._directory.of(namespace.root) as folder,
                folder.opened(name) as descriptor,
            ):
                used = os.fstat(descriptor).st_mtime
                self._index.add(Group(namespace, name, _table(descriptor, namespace), used))
        except RefusedGroupError as refused:
            self._refuse(namespace.root, name, refused.cause)
        except OSError as error:  # gone again, or a bad sector
            logger.debug("%s of %s: %s", name, namespace.root.hex(), error)
            return error.errno not in _PASSING
        return True

    def _forget(self, root: bytes) -> None:
        self._seen.pop(root, None)
        self._index.remove_namespace(root)


def _table(descriptor: int, namespace: TierNamespace) -> GroupTable:
    """The file's table; one of no records for what another version of the software wrote."""
    try:
        return read_table(descriptor, namespace)
    except RefusedGroupError as refused:
        if refused.cause is not Cause.VERSION:
            raise
        return GroupTable((), os.fstat(descriptor).st_size)
