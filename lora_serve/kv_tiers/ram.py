"""The tier in this process's memory: records bounded by bytes, least recently used first out."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lora_serve.config import KVTierConfig
from lora_serve.engine_stats import TierContents
from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import (
    Cause,
    Drop,
    Loaded,
    Record,
    Tier,
    TierNamespace,
    TierTraits,
    TierWatcher,
)
from lora_serve.kv_tiers.codec import damage
from lora_serve.kv_tiers.kind import TierKind
from lora_serve.kv_tiers.mac import MacKeys


@dataclass(slots=True, eq=False)
class _Entries:
    """The blocks of one namespace; never empty between calls."""

    namespace: TierNamespace
    hashes: set[BlockHash] = field(default_factory=set)


class RamTier:
    """Thread-safe. It copies payloads: a view would keep the whole buffer alive.

    No other process can write here, so no MAC is checked.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.name = KIND.name
        self.traits = TierTraits(num_readers=1, linger_seconds=0.0, takes_promoted=True)
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[BlockHash, tuple[bytes, Record]] = OrderedDict()  # root, record
        self._by_root: dict[bytes, _Entries] = {}
        self._num_bytes = 0
        self._num_evicted = 0
        self._quarantined: Counter[str] = Counter()
        self._watcher: TierWatcher | None = None

    def watch(self, watcher: TierWatcher) -> None:
        self._watcher = watcher

    def holds(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        return block_hash in self._records

    def may_hold(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        return self.holds(namespace, block_hash)

    def load(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> Loaded:
        good: list[Record] = []
        for record in self._lookup(hashes):
            cause = damage(namespace, record)
            if cause is not None:
                self._refuse(record, cause)
                return Loaded(tuple(good), cause)
            good.append(record)
        return Loaded(tuple(good), None if len(good) == len(hashes) else Cause.ABSENT)

    def _lookup(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """Find the records of the first blocks, and make them the most recent, the head last."""
        with self._lock:
            found: list[Record] = []
            for block_hash in hashes:
                entry = self._records.get(block_hash)
                if entry is None:
                    break
                found.append(entry[1])
            for record in reversed(found):
                self._records.move_to_end(record.block_hash)
        return found

    def save(self, namespace: TierNamespace, records: Sequence[Record]) -> int:
        """Blocks of one call go in tail first: the head of a prefix is worth most."""
        owned = [replace(record, payload=bytes(record.payload)) for record in records]
        with self._lock:
            for record in reversed(owned):
                self._remove(record.block_hash)
                self._insert(namespace, record)
            if self._watcher is not None:
                hashes = [record.block_hash for record in records]
                self._watcher.stored(self.name, namespace, hashes)
            self._evict()
        return len(records)

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            for block_hash in reversed(hashes):
                if block_hash in self._records:
                    self._records.move_to_end(block_hash)

    def drop(self, drop: Drop) -> None:
        with self._lock:
            for entries in list(self._by_root.values()):
                if drop.takes(entries.namespace):
                    for block_hash in list(entries.hashes):
                        self._remove(block_hash)

    def contents(self) -> TierContents:
        with self._lock:
            return TierContents(
                num_blocks=len(self._records),
                num_bytes=self._num_bytes,
                capacity_bytes=self._capacity_bytes,
                num_evicted=self._num_evicted,
                quarantined=dict(self._quarantined),
            )

    def close(self) -> None:
        with self._lock:
            self._records.clear()
            self._by_root.clear()
            self._num_bytes = 0

    def _refuse(self, record: Record, cause: Cause) -> None:
        """Forget a record that went bad in memory; there is nothing to set aside."""
        with self._lock:
            self._remove(record.block_hash)
            self._quarantined[cause.value] += 1

    def _insert(self, namespace: TierNamespace, record: Record) -> None:
        entries = self._by_root.setdefault(namespace.root, _Entries(namespace))
        entries.hashes.add(record.block_hash)
        self._records[record.block_hash] = (namespace.root, record)
        self._num_bytes += record.num_bytes

    def _evict(self) -> None:
        while self._num_bytes > self._capacity_bytes:
            self._remove(next(iter(self._records)))
            self._num_evicted += 1

    def _remove(self, block_hash: BlockHash) -> None:
        entry = self._records.pop(block_hash, None)
        if entry is None:
            return
        root, record = entry
        self._num_bytes -= record.num_bytes
        hashes = self._by_root[root].hashes
        hashes.discard(block_hash)
        if not hashes:
            del self._by_root[root]
        if self._watcher is not None:
            self._watcher.removed(self.name, [block_hash])


def _open(config: KVTierConfig, keys: MacKeys) -> Tier:
    assert config.kv_ram_bytes, "a tier in memory is named"
    return RamTier(config.kv_ram_bytes)


KIND = TierKind(
    name="ram",
    is_named=lambda config: bool(config.kv_ram_bytes),
    check=lambda config, keys: None,
    open=_open,
    inspect=lambda place: None,
)
