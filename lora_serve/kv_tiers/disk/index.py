"""Which block lies where on the disk, and which group was used least recently. No I/O here.

Thread-safe; each method is one atomic change or answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import TierNamespace
from lora_serve.kv_tiers.disk.group_file import GroupTable


@dataclass(slots=True, eq=False)
class Group:
    """One file. used: when it was last read or written, as far as the file's own time says it.

    In seconds since 1970; every use counts for the order of eviction, few are noted in the file.
    """

    namespace: TierNamespace
    file_name: str
    table: GroupTable
    used: float


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive records of one file: `count` from `first` on."""

    group: Group
    first: int
    count: int


class DiskIndex:
    """A block is found in one group only: the first that was added with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: OrderedDict[Group, None] = OrderedDict()  # least recently used first
        self._by_root: dict[bytes, dict[str, Group]] = {}
        self._where: dict[BlockHash, tuple[Group, int]] = {}
        self.num_bytes = 0
        self.removed: Callable[[Sequence[BlockHash]], None] | None = None  # told what is gone

    @property
    def num_blocks(self) -> int:
        return len(self._where)

    def holds(self, block_hash: BlockHash) -> bool:
        return block_hash in self._where

    def runs(self, hashes: Sequence[BlockHash], max_blocks: int) -> list[Run]:
        """Find where `hashes` lie, up to the first that is not here."""
        with self._lock:
            runs: list[Run] = []
            for block_hash in hashes[:max_blocks]:
                group, position = self._where.get(block_hash, (None, 0))
                if group is None:
                    break
                last = runs[-1] if runs else None
                if last and last.group is group and last.first + last.count == position:
                    runs[-1] = Run(group, last.first, last.count + 1)
                else:
                    runs.append(Run(group, position, 1))
            return runs

    def groups_of(self, hashes: Sequence[BlockHash]) -> list[Group]:
        """The files that hold any of `hashes`, each once, in this order."""
        with self._lock:
            found = (self._where.get(block_hash) for block_hash in hashes)
            return list(dict.fromkeys(place[0] for place in found if place is not None))

    def knows(self, root: bytes, file_name: str) -> bool:
        with self._lock:
            return file_name in self._by_root.get(root, ())

    def file_names(self, root: bytes) -> set[str]:
        with self._lock:
            return set(self._by_root.get(root, ()))

    def roots(self) -> list[bytes]:
        with self._lock:
            return list(self._by_root)

    def add(self, group: Group) -> None:
        """Add a group as the most recently used one; it replaces what is known of its file."""
        with self._lock:
            files = self._by_root.setdefault(group.namespace.root, {})
            if group.file_name in files:
                self._remove(files[group.file_name])
                files = self._by_root.setdefault(group.namespace.root, {})
            files[group.file_name] = group
            self._groups[group] = None
            self.num_bytes += group.table.num_bytes
            for position, block_hash in enumerate(group.table.hashes):
                self._where.setdefault(block_hash, (group, position))

    def remove(self, group: Group) -> bool:
        """Forget a file; False if that was done before."""
        with self._lock:
            return self._remove(group)

    def remove_file(self, root: bytes, file_name: str) -> None:
        with self._lock:
            group = self._by_root.get(root, {}).get(file_name)
            if group is not None:
                self._remove(group)

    def remove_namespace(self, root: bytes) -> None:
        with self._lock:
            for group in list(self._by_root.get(root, {}).values()):
                self._remove(group)

    def touch(self, group: Group) -> None:
        with self._lock:
            if group in self._groups:
                self._groups.move_to_end(group)

    def oldest(self) -> Group | None:
        with self._lock:
            return next(iter(self._groups), None)

    def sort(self) -> None:
        """Order all groups by when they were used, after they were added as they were found."""
        with self._lock:
            for group in sorted(self._groups, key=lambda group: group.used):
                self._groups.move_to_end(group)

    def _remove(self, group: Group) -> bool:
        if group not in self._groups:
            return False
        del self._groups[group]
        files = self._by_root[group.namespace.root]
        del files[group.file_name]
        if not files:
            del self._by_root[group.namespace.root]
        self.num_bytes -= group.table.num_bytes
        gone = [h for h in group.table.hashes if self._where.get(h, (None, 0))[0] is group]
        for block_hash in gone:
            del self._where[block_hash]
        if self.removed is not None:
            self.removed(gone)
        return True
