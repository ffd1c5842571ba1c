"""The tier that replicas share: records in Redis or Valkey, through its client library.

The server decides how much is kept: set its maxmemory, and maxmemory-policy volatile-lru. Its
answers are not trusted: each record is checked like a file's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from lora_serve.engine_stats import TierContents
from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import (
    Cause,
    Drop,
    Loaded,
    Record,
    TierNamespace,
    TierTraits,
    TierWatcher,
)
from lora_serve.kv_tiers.codec import HEADER_BYTES, NO_KEYS, record_bytes, refusal
from lora_serve.kv_tiers.mac import MacKeys
from lora_serve.kv_tiers.redis.keyspace import Entry, RedisKeyspace

LOAD_BYTES = 8 * 2**20  # one load; it must come within the deadline
SAVE_TIMEOUT_SECONDS = 5.0


class RedisTier:
    """Connects when first used; a server that is not there is a TierError then."""

    def __init__(
        self,
        url: str,
        load_timeout_seconds: float,
        *,
        password: str | None = None,
        keys: MacKeys = NO_KEYS,
    ) -> None:
        """Raises ConfigError for a URL that names no server. `keys`: whose records are accepted."""
        self.name = "redis"
        self.traits = TierTraits()
        save_timeout_seconds = max(SAVE_TIMEOUT_SECONDS, load_timeout_seconds)
        self._loads = RedisKeyspace(url, load_timeout_seconds, password)
        self._saves = RedisKeyspace(url, save_timeout_seconds, password)
        self._keys = keys
        self._quarantined: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._watcher: TierWatcher | None = None

    def watch(self, watcher: TierWatcher) -> None:
        self._watcher = watcher

    def holds(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        return False  # only the server knows

    def may_hold(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        return True

    def load(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> Loaded:
        entry = self._loads.entry(namespace)
        if entry is None:
            self._note_gone(hashes)
            return Loaded(cause=Cause.ABSENT)
        asked = hashes[: max(LOAD_BYTES // record_bytes(namespace), 1)]
        records: list[Record] = []
        for block_hash, value in zip(asked, self._loads.read(entry, asked), strict=False):
            if value is None:
                self._note_gone([block_hash])
                return Loaded(tuple(records), Cause.ABSENT)
            record = as_record(block_hash, value)
            cause = refusal(namespace, record, self._keys)
            if cause is not None:
                self._refuse(entry, block_hash, cause)
                return Loaded(tuple(records), cause)
            records.append(record)
        is_short = len(records) < len(asked)
        return Loaded(tuple(records), Cause.ABSENT if is_short else None)

    def save(self, namespace: TierNamespace, records: Sequence[Record]) -> int:
        entry = self._saves.ensure_entry(namespace)
        missing = self._saves.missing(entry, [record.block_hash for record in records])
        new = [record for record in records if record.block_hash in missing]
        if new:
            self._saves.write(entry, new)
            self._trim(entry, len(new))
        if self._watcher is not None:
            self._watcher.stored(self.name, namespace, [record.block_hash for record in records])
        return len(new)

    def _trim(self, entry: Entry, num_written: int) -> None:
        """Look at twice as many members as were written, so that at most half of them are dead."""
        for one in (entry, *self._saves.some_entries(2)):
            self._saves.trim(one, 2 * num_written)

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        entry = self._saves.entry(namespace)
        if entry is not None:
            self._saves.touch(entry, hashes)

    def drop(self, drop: Drop) -> None:
        for entry in self._saves.entries():
            if drop.takes(entry.namespace):
                self._saves.forget(entry)

    def contents(self) -> TierContents:
        with self._lock:
            return TierContents(quarantined=dict(self._quarantined))

    def ping(self) -> None:
        """Raises TierError where the server does not answer, or refuses the password."""
        self._saves.ping()

    def close(self) -> None:
        self._loads.close()
        self._saves.close()

    def _refuse(self, entry: Entry, block_hash: BlockHash, cause: Cause) -> None:
        """Also one by a key that we lack: in its place nothing of ours could be saved."""
        with self._lock:
            self._quarantined[cause.value] += 1
        self._loads.remove(entry, [block_hash])
        self._note_gone([block_hash])

    def _note_gone(self, hashes: Sequence[BlockHash]) -> None:
        """What the server let go becomes known when it is asked for."""
        if self._watcher is not None:
            self._watcher.removed(self.name, hashes)


def as_record(block_hash: BlockHash, value: object) -> Record:
    """What the server sent, as a record; anything but bytes is an empty one, which is refused."""
    data = value if isinstance(value, bytes) else b""
    return Record(block_hash, data[:HEADER_BYTES], memoryview(data)[HEADER_BYTES:])
