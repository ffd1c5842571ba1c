"""Looks into the Redis tier from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import TierNamespace
from lora_serve.kv_tiers.codec import record_bytes
from lora_serve.kv_tiers.inspection import Summary, Verdict
from lora_serve.kv_tiers.mac import MacKeys
from lora_serve.kv_tiers.redis.keyspace import Entry, RedisKeyspace
from lora_serve.kv_tiers.redis.tier import as_record

TIMEOUT_SECONDS = 10.0
READ_BYTES = 8 * 2**20


class RedisInspection:
    """Every method raises TierError when the server cannot be asked."""

    def __init__(self, url: str, password: str | None, keys: MacKeys) -> None:
        """Raises ConfigError for a URL that names no server."""
        self._keyspace = RedisKeyspace(url, TIMEOUT_SECONDS, password)
        self._keys = keys

    def summaries(self) -> list[Summary]:
        return [self._summary(entry) for entry in self._keyspace.entries()]

    def _summary(self, entry: Entry) -> Summary:
        summary = Summary(entry.namespace)
        for members in self._keyspace.members(entry):
            sizes = self._keyspace.sizes(entry, [block_hash for block_hash, _ in members])
            for (_, written), size in zip(members, sizes, strict=True):
                if size:  # else the server has evicted it
                    summary.add(1, size, written)
        return summary

    def verify(self) -> Iterator[Verdict]:
        for entry in self._keyspace.entries():
            verdict = Verdict(entry.namespace, self._keys)
            for members in self._keyspace.members(entry):
                self._verify(entry, [block_hash for block_hash, _ in members], verdict)
            yield verdict

    def _verify(self, entry: Entry, hashes: Sequence[BlockHash], verdict: Verdict) -> None:
        per_read = max(READ_BYTES // record_bytes(entry.namespace), 1)
        for start in range(0, len(hashes), per_read):
            some = hashes[start : start + per_read]
            for block_hash, value in zip(some, self._keyspace.read(entry, some), strict=True):
                if value is not None:  # else the server has evicted it
                    verdict.judge(as_record(block_hash, value))

    def num_broken(self) -> int:
        return len(self._keyspace.broken_roots())

    def clear(self, namespaces: Sequence[TierNamespace]) -> None:
        roots = {namespace.root for namespace in namespaces}
        for entry in self._keyspace.entries():
            if entry.namespace.root in roots:
                self._keyspace.forget(entry)

    def clear_everything(self) -> None:
        self._keyspace.forget_everything()

    def facts(self) -> Mapping[str, int | str]:
        server = self._keyspace.server_facts()
        return {
            "server_bytes": _plain(server.get("used_memory")),
            "maxmemory_bytes": _plain(server.get("maxmemory")),
            "maxmemory-policy": _plain(server.get("maxmemory_policy")),
            "evicted_keys": _plain(server.get("evicted_keys")),
        }

    def close(self) -> None:
        self._keyspace.close()


def _plain(value: object) -> int | str:
    return value if isinstance(value, int) else str(value)
