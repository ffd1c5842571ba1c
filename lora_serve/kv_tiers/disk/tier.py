"""The tier on a disk: one file per group of blocks, an index in memory, bounded by bytes.

The index is rebuilt in the background at start and follows what other processes write to the same
directory. Reads and writes come from different threads; a file that has vanished is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

from lora_serve.engine_stats import TierContents
from lora_serve.folders.folder import Folder
from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import (
    Cause,
    Drop,
    Loaded,
    Record,
    TierError,
    TierNamespace,
    TierTraits,
    TierWatcher,
)
from lora_serve.kv_tiers.codec import NO_KEYS, record_bytes, refusal
from lora_serve.kv_tiers.disk.change_log import Place
from lora_serve.kv_tiers.disk.directory import GROUP_SUFFIX, DiskDirectory
from lora_serve.kv_tiers.disk.group_file import (
    MAX_RECORDS,
    GroupTable,
    group_bytes,
    read_records,
    write_group,
)
from lora_serve.kv_tiers.disk.index import DiskIndex, Group, Run
from lora_serve.kv_tiers.disk.scan import LOOK_AGAIN_SECONDS, DiskScan
from lora_serve.kv_tiers.disk.staging import Staged
from lora_serve.kv_tiers.mac import MacKeys
from lora_serve.kv_tiers.read_buffers import ReadBuffers

logger = logging.getLogger(__name__)

LOAD_BYTES = 16 * 2**20  # one load; large enough to be sequential, small beside a deadline
NUM_KEPT_BUFFERS = 8  # loads of one long prompt, and a little more
LARGEST_GROUP_SHARE = 8  # a file is at most this part of the bound, so that eviction is gradual
QUARANTINE_SHARE = 16  # part of the bound that is set aside for refused files
MAX_QUARANTINED = 8
TOUCH_SECONDS = 60.0  # a file's time of use is written at most this often


class DiskTier:
    """Keeps at most `capacity_bytes` at `path`, other processes' files included."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        keys: MacKeys = NO_KEYS,
        poll_seconds: float = 0.5,
        follows_others: bool = False,
        write: Callable[[int, TierNamespace, Sequence[Record]], int] = write_group,
    ) -> None:
        """Raises ConfigError if `path` cannot be a directory of ours alone (ownership.py).

        keys: whose records are accepted. follows_others: look for what is not known each time that
        it is asked for, as another process may have saved it just now. `write` has write_group's
        contract.
        """
        self.name = "disk"
        self.traits = TierTraits()
        self._directory = DiskDirectory(path)
        self._capacity_bytes = capacity_bytes
        self._quarantine_bytes = capacity_bytes // QUARANTINE_SHARE
        self._keys = keys
        self._write = write
        self._index = DiskIndex()
        self._buffers = ReadBuffers(LOAD_BYTES, NUM_KEPT_BUFFERS)
        self._num_evicted = 0
        self._quarantined: Counter[str] = Counter()
        self._reserved_elsewhere: dict[Place, int] = {}  # when this process last looked
        self._count_lock = threading.Lock()
        self._watcher: TierWatcher | None = None
        self._follows_others = follows_others
        look_again_seconds = 0.0 if follows_others else LOOK_AGAIN_SECONDS
        self._scan = DiskScan(
            self._directory, self._index, self._quarantine_file, poll_seconds, look_again_seconds
        )

    def watch(self, watcher: TierWatcher) -> None:
        self._watcher = watcher
        self._index.removed = partial(watcher.removed, self.name)

    def wait_until_indexed(self) -> None:
        """Wait until all that was here at start can be found."""
        self._scan.wait_until_complete()

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    def holds(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        return self._index.holds(block_hash)

    def may_hold(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        may_find = self._follows_others or self._scan.may_find(namespace.root)
        return may_find or self._index.holds(block_hash)

    def load(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> Loaded:
        most = max(LOAD_BYTES // record_bytes(namespace), 1)
        with _tier_errors(f"reading from {self._directory.path}"):
            runs = self._index.runs(hashes, most)
            if not runs and self._scan.look_again(namespace.root):
                runs = self._index.runs(hashes, most)
            size = record_bytes(namespace)
            rest = self._buffers.take(sum(run.count for run in runs) * size)
            records: list[Record] = []
            for run in runs:
                into, rest = rest[: run.count * size], rest[run.count * size :]
                cause = self._load_run(namespace, run, into, records)
                if cause is not None:
                    return Loaded(tuple(records), cause)
        return Loaded(tuple(records), None if runs else Cause.ABSENT)

    def _load_run(
        self, namespace: TierNamespace, run: Run, into: memoryview, records: list[Record]
    ) -> Cause | None:
        """Append the run's records up to one that is refused; returns why it was refused."""
        try:
            with self._folder(run.group) as folder, folder.opened(run.group.file_name) as file:
                read = read_records(file, namespace, run.group.table, run.first, into)
        except FileNotFoundError:  # another process evicted it
            self._index.remove(run.group)
            return Cause.ABSENT
        for record in read:
            cause = refusal(namespace, record, self._keys)
            if cause is not None:
                self._refuse(run.group, cause)
                return cause
            records.append(record)
        self._touch(run.group)
        return None

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        for group in reversed(self._index.groups_of(hashes)):  # the head of a prefix last
            self._touch(group)

    def _touch(self, group: Group) -> None:
        """Note the use, for this process and now and then for the others."""
        self._index.touch(group)
        now = time.time()
        if now - group.used > TOUCH_SECONDS:
            group.used = now
            try:
                with self._folder(group) as folder:
                    folder.set_time(group.file_name, now)
            except OSError as error:  # read-only, or evicted just now: the reading was fine
                logger.debug("%s: its time of use was not noted: %s", group.file_name, error)

    # ── writing ─────────────────────────────────────────────────────────────────────────────

    def save(self, namespace: TierNamespace, records: Sequence[Record]) -> int:
        self._scan.wait_until_complete()  # before, it is not known how much lies here
        new = [record for record in records if not self._index.holds(record.block_hash)]
        most = min(MAX_RECORDS, self._largest_group_bytes // record_bytes(namespace))
        if most == 0:
            raise TierError(f"a block of {namespace.block_bytes} bytes is too large for the bound")
        with _tier_errors(f"writing to {self._directory.path}"):
            for start in range(0, len(new), most):
                self._save_group(namespace, new[start : start + most])
        return len(new)

    @property
    def _largest_group_bytes(self) -> int:
        return self._capacity_bytes // LARGEST_GROUP_SHARE

    def _save_group(self, namespace: TierNamespace, records: Sequence[Record]) -> None:
        self._directory.check_in_place()
        self._directory.empty_trash()  # before more is written: what was dropped takes room, too
        place = Place(namespace.root, uuid4().hex + GROUP_SUFFIX)
        with self._reserve(place, group_bytes(namespace, records)) as staged:
            num_bytes = self._write(staged.descriptor, namespace, records)
            self._directory.publish(staged, namespace, place.name)
        hashes = tuple(record.block_hash for record in records)
        if self._watcher is not None:  # first: what the index has may be removed at once
            self._watcher.stored(self.name, namespace, hashes)
        self._index.add(Group(namespace, place.name, GroupTable(hashes, num_bytes), time.time()))

    def _reserve(self, place: Place, num_bytes: int) -> Staged:
        """Stage a file of this size, within the bound whatever other processes do meanwhile."""
        with self._directory.writers_turn() as turn:
            if turn.changes is None or turn.changes or self._reserved_elsewhere:
                self._look_at(turn.changes)
            evicted = self._make_room(sum(self._reserved_elsewhere.values()) + num_bytes)
            turn.tell([*evicted, place])  # before it is there: telling too early does no harm
            return self._directory.reserve(place, num_bytes)

    def _look_at(self, changes: Sequence[Place] | None) -> None:
        """Bring the index up to date with what other processes have changed, or may have."""
        staged = self._reserved_elsewhere
        # before looking: what is moved into its place meanwhile shall rather count twice
        self._reserved_elsewhere = self._directory.reserved_elsewhere()
        if changes is None:
            self._scan.look_everywhere()
        else:
            self._scan.look_at(dict.fromkeys((*staged, *changes)))

    def _make_room(self, num_bytes: int) -> list[Place]:
        """Evict files for it; returns the places where they were."""
        evicted: list[Place] = []
        limit = self._capacity_bytes - self._quarantine_bytes
        while self._index.num_bytes + num_bytes > limit:
            group = self._index.oldest()
            if group is None:
                break
            if not self._was_used_elsewhere(group):
                self._evict(group)
                evicted.append(Place(group.namespace.root, group.file_name))
        return evicted

    def _was_used_elsewhere(self, group: Group) -> bool:
        """Whether another process has used it since; then it is not the oldest."""
        try:
            with self._folder(group) as folder:
                used = folder.status_of(group.file_name).st_mtime
        except FileNotFoundError:
            return False
        if used <= group.used + TOUCH_SECONDS / 2:
            return False
        group.used = used
        self._index.touch(group)
        return True

    def _evict(self, group: Group) -> None:
        with suppress(FileNotFoundError), self._folder(group) as folder:
            if folder.unlink(group.file_name):  # else another process was first
                self._num_evicted += len(group.table.hashes)
        self._index.remove(group)
        if not self._index.file_names(group.namespace.root):
            self._scan.retire(group.namespace.root)

    # ── dropping ────────────────────────────────────────────────────────────────────────────

    def drop(self, drop: Drop) -> None:
        with _tier_errors(f"forgetting KV in {self._directory.path}"):
            self._directory.check_in_place()
            for root in self._directory.roots():
                namespace = self._directory.describe(root)
                if namespace is None or drop.takes(namespace):
                    self._drop_root(root)
            self._directory.sync_trash()

    def _drop_root(self, root: bytes) -> None:
        self._index.remove_namespace(root)
        self._directory.trash(root)
        self._scan.empty_trash_soon()

    def _refuse(self, group: Group, cause: Cause) -> None:
        if not self._index.remove(group):
            return
        if cause is Cause.KEY:  # other servers may use it; it takes room still
            table = GroupTable((), group.table.num_bytes)
            self._index.add(Group(group.namespace, group.file_name, table, group.used))
        else:
            self._quarantine_file(group.namespace.root, group.file_name, cause)

    def _quarantine_file(self, root: bytes, name: str, cause: Cause) -> None:
        most_bytes = self._quarantine_bytes
        file = f"{self._directory.path}/…/{root.hex()[:16]}…/{name}"
        try:
            if not self._directory.quarantine(root, name, MAX_QUARANTINED, most_bytes):
                return
        except OSError as error:
            logger.warning("%s could not be set aside: %s", file, error)
        else:
            logger.warning("%s was refused (%s) and set aside", file, cause.value)
        with self._count_lock:
            self._quarantined[cause.value] += 1

    def _folder(self, group: Group) -> Folder:
        return self._directory.of(group.namespace.root)

    def contents(self) -> TierContents:
        with self._count_lock:
            quarantined = dict(self._quarantined)
        return TierContents(
            num_blocks=self._index.num_blocks,
            num_bytes=self._index.num_bytes,
            capacity_bytes=self._capacity_bytes,
            num_evicted=self._num_evicted,
            quarantined=quarantined,
        )

    def close(self) -> None:
        self._scan.close()
        self._directory.close()


@contextmanager
def _tier_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierError(f"{doing}: {error}") from error
