"""How KV lies in Redis or Valkey, and the few commands that reach it. Checks no record.

    lora-serve:kv:2:namespaces              hash: root → descriptor with the namespace's epoch
    lora-serve:kv:2:block:EPOCH:HASH        string: one record (codec.py); it expires
    lora-serve:kv:2:members:EPOCH           sorted set: hashes, by when they were written

An epoch is drawn when a namespace is first written to, and is part of its blocks' keys. So
forgetting its field makes all its blocks unreachable at once, for all replicas, even if the server
has evicted other keys of ours; they are then unlinked through the members. Only blocks expire, so a
maxmemory-policy of volatile-lru evicts blocks alone. Each server that writes trims what led to
evicted blocks (`trim`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
import redis

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Record, TierError, TierNamespace
from lora_serve.kv_tiers.codec import VERSION
from lora_serve.redis_client import open_redis, reason_of

PREFIX = b"lora-serve:kv:%d:" % VERSION  # what another version wrote is never met
NAMESPACES = PREFIX + b"namespaces"
BATCH_BYTES = 4 * 2**20  # of one pipeline: neither side has to buffer more
BATCH_KEYS = 512
SOCKET_READ_BYTES = 2**20
MAX_ANSWER_BYTES = 256 * 2**20  # a record of one block has some megabytes in the largest models
EXPIRE_SECONDS = 7 * 24 * 3600  # after it was written; frees what nothing leads to any more, too


@dataclass(frozen=True, slots=True)
class Entry:
    """A namespace, and the epoch that its blocks' keys carry."""

    namespace: TierNamespace
    epoch: str

    @property
    def members(self) -> bytes:
        return PREFIX + b"members:" + self.epoch.encode()

    def block(self, block_hash: BlockHash) -> bytes:
        return PREFIX + b"block:" + self.epoch.encode() + b":" + block_hash


class RedisKeyspace:
    """Thread-safe. Every method raises TierError when the server cannot do it now."""

    def __init__(self, url: str, timeout_seconds: float, password: str | None = None) -> None:
        """Raises ConfigError for a URL that names no server; connects when first used.

        timeout_seconds: how long each answer, and a connection, may take.
        password: the server's, if it does not stand in the URL.
        """
        self._redis = open_redis(
            "--kv-redis-url",
            url,
            password,
            timeout_seconds,
            MAX_ANSWER_BYTES,
            socket_read_size=SOCKET_READ_BYTES,
        )

    def ping(self) -> None:
        with _tier_errors():
            self._redis.ping()

    # ── namespaces ──────────────────────────────────────────────────────────────────────────

    def entry(self, namespace: TierNamespace) -> Entry | None:
        """The namespace's entry, if it has one that can be read."""
        with _tier_errors():
            return _entry(namespace.root, self._redis.hget(NAMESPACES, namespace.root))

    def ensure_entry(self, namespace: TierNamespace) -> Entry:
        with _tier_errors():
            text = self._redis.hget(NAMESPACES, namespace.root)
            found = _entry(namespace.root, text)
            if found is not None:
                return found
            made = Entry(namespace, uuid4().hex)
            # another replica may be first; but what cannot be read leads to nothing
            put = self._redis.hsetnx if text is None else self._redis.hset
            put(NAMESPACES, namespace.root, msgspec.json.encode(made))
        return self.entry(namespace) or made

    def entries(self) -> list[Entry]:
        """All namespaces, of any replica, whose fields can be read."""
        return [entry for entry in self._fields().values() if entry is not None]

    def broken_roots(self) -> list[bytes]:
        """Roots whose fields cannot be read; their blocks cannot be found."""
        return [root for root, entry in self._fields().items() if entry is None]

    def _fields(self) -> dict[bytes, Entry | None]:
        with _tier_errors():
            fields = self._redis.hgetall(NAMESPACES)
        return {root: _entry(root, text) for root, text in fields.items()}

    def some_entries(self, count: int) -> list[Entry]:
        """Draw namespaces at random, at most so many."""
        with _tier_errors():
            roots = self._redis.hrandfield(NAMESPACES, count)
            texts = self._redis.hmget(NAMESPACES, roots) if roots else []
        found = (_entry(root, text) for root, text in zip(roots, texts, strict=True))
        return [entry for entry in found if entry is not None]

    def forget(self, entry: Entry) -> None:
        """Make a namespace's blocks unreachable, then free their memory in small turns."""
        with _tier_errors():
            self._redis.expire(entry.members, EXPIRE_SECONDS)  # should this process end half-way
            self._redis.hdel(NAMESPACES, entry.namespace.root)
        self._free(entry)

    def _free(self, entry: Entry) -> None:
        with _tier_errors():
            while popped := self._redis.zpopmin(entry.members, BATCH_KEYS):
                self._redis.unlink(*(entry.block(block_hash) for block_hash, _ in popped))

    def forget_everything(self) -> None:
        """Delete all keys of this scheme, also unreachable ones. Scans; for operators."""
        with _tier_errors():
            self._redis.unlink(NAMESPACES)
            batch: list[bytes] = []
            for key in self._redis.scan_iter(match=PREFIX + b"*", count=BATCH_KEYS):
                batch.append(key)
                if len(batch) == BATCH_KEYS:
                    self._redis.unlink(*batch)
                    batch = []
            if batch:
                self._redis.unlink(*batch)

    # ── blocks ──────────────────────────────────────────────────────────────────────────────

    def read(self, entry: Entry, hashes: Sequence[BlockHash]) -> list[object]:
        """Read what lies at each block's key: a record, None, or whatever the server says."""
        with _tier_errors():
            return list(self._redis.mget([entry.block(block_hash) for block_hash in hashes]))

    def sizes(self, entry: Entry, hashes: Sequence[BlockHash]) -> list[int]:
        """Bytes of each block's record, 0 if it is not there."""
        with _tier_errors(), self._pipeline() as pipeline:
            for block_hash in hashes:
                pipeline.strlen(entry.block(block_hash))
            return [int(size) for size in pipeline.execute()]

    def missing(self, entry: Entry, hashes: Sequence[BlockHash]) -> set[BlockHash]:
        with _tier_errors(), self._pipeline() as pipeline:
            for block_hash in hashes:
                pipeline.exists(entry.block(block_hash))
            found = pipeline.execute()
        return {one for one, is_there in zip(hashes, found, strict=True) if not is_there}

    def write(self, entry: Entry, records: Sequence[Record]) -> None:
        now = time.time()
        per_turn = max(BATCH_BYTES // max(record.num_bytes for record in records), 1)
        for start in range(0, len(records), per_turn):
            turn = records[start : start + per_turn]
            with _tier_errors(), self._pipeline() as pipeline:
                # members first: a block that no set leads to could never be dropped
                pipeline.zadd(entry.members, {record.block_hash: now for record in turn})
                for record in turn:
                    value = b"".join((record.header, record.payload))
                    pipeline.set(entry.block(record.block_hash), value, ex=EXPIRE_SECONDS)
                pipeline.execute()
        if (
            self.entry(entry.namespace) != entry
        ):  # forgotten meanwhile: these cannot be found any more
            self._free(entry)

    def touch(self, entry: Entry, hashes: Sequence[BlockHash]) -> None:
        """Renew the blocks' expiry; the server counts it as a use, too."""
        for start in range(0, len(hashes), BATCH_KEYS):
            with _tier_errors(), self._pipeline() as pipeline:
                for block_hash in hashes[start : start + BATCH_KEYS]:
                    pipeline.expire(entry.block(block_hash), EXPIRE_SECONDS)
                pipeline.execute()

    def remove(self, entry: Entry, hashes: Sequence[BlockHash]) -> None:
        with _tier_errors(), self._pipeline() as pipeline:
            pipeline.unlink(*(entry.block(block_hash) for block_hash in hashes))
            pipeline.zrem(entry.members, *hashes)
            pipeline.execute()

    def trim(self, entry: Entry, count: int) -> None:
        """Look at some members; remove those whose blocks were evicted or have expired.

        The namespace goes with the last of them.
        """
        with _tier_errors():
            some = list(dict.fromkeys(self._redis.zrandmember(entry.members, count)))
        dead = self.missing(entry, some)
        if not dead:
            return
        with _tier_errors():
            self._redis.zrem(entry.members, *dead)
            is_empty = not self._redis.exists(entry.members)
        if is_empty:
            self.forget(entry)

    def members(self, entry: Entry) -> Iterator[list[tuple[BlockHash, float]]]:
        """Give the hashes of a namespace's blocks and when they were written, some at a time."""
        cursor = 0
        while True:
            with _tier_errors():
                cursor, some = self._redis.zscan(entry.members, cursor, count=BATCH_KEYS)
            yield [(BlockHash(block_hash), written) for block_hash, written in some]
            if not cursor:
                return

    def server_facts(self) -> dict[str, object]:
        """The server's own account of its memory and evictions."""
        with _tier_errors():
            return {**self._redis.info("memory"), **self._redis.info("stats")}

    def close(self) -> None:
        self._redis.close()

    def _pipeline(self) -> Any:
        return self._redis.pipeline(transaction=False)


def _entry(root: bytes, text: object) -> Entry | None:
    if not isinstance(text, bytes):
        return None
    try:
        entry = msgspec.json.decode(text, type=Entry)
    except msgspec.DecodeError:
        return None
    return entry if entry.namespace.root == root else None


@contextmanager
def _tier_errors() -> Iterator[None]:
    """ValueError and TypeError are what redis-py raises for malformed answers."""
    try:
        yield
    except (redis.RedisError, OSError, ValueError, TypeError) as error:
        raise TierError(f"Redis: {reason_of(error)}") from error
