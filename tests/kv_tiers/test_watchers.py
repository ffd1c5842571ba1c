"""What tiers tell their watchers: all that enters and leaves them, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Drop, Tier, TierNamespace
from lora_serve.kv_tiers.codec import record_bytes
from lora_serve.kv_tiers.disk.tier import DiskTier
from lora_serve.kv_tiers.ram import RamTier
from lora_serve.kv_tiers.redis.tier import RedisTier
from lora_serve.kv_tiers.store import TieredStore
from tests.fakes.kv_blocks import a_namespace, blocks, chain, records
from tests.fakes.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

NAMESPACE = a_namespace()
HASHES = chain(NAMESPACE, "prompt", 4)
DROP = Drop(NAMESPACE.model, NAMESPACE.lora_name)


class Watcher:
    """Notes what it hears, as (what, tier, how many blocks)."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, int]] = []
        self.here: set[tuple[str, BlockHash]] = set()

    def stored(self, tier: str, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        self.heard.append(("stored", tier, len(hashes)))
        self.here |= {(tier, block_hash) for block_hash in hashes}

    def already_stored(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        self.heard.append(("already_stored", tier, len(hashes)))

    def removed(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        self.heard.append(("removed", tier, len(hashes)))
        self.here -= {(tier, block_hash) for block_hash in hashes}

    def dropped(self, tier: str, drop: Drop) -> None:
        self.heard.append(("dropped", tier, 0))


def test_memory_tells_of_its_evictions() -> None:
    tier, watcher = RamTier(2 * record_bytes(NAMESPACE)), Watcher()
    tier.watch(watcher)
    tier.save(NAMESPACE, records(NAMESPACE, HASHES))
    assert watcher.here == {("ram", block_hash) for block_hash in HASHES[:2]}
    assert all(tier.holds(NAMESPACE, block_hash) for _, block_hash in watcher.here)


def test_a_disk_tells_of_what_is_dropped(tmp_path: Path) -> None:
    tier, watcher = DiskTier(tmp_path / "kv", 2**20), Watcher()
    try:
        tier.watch(watcher)
        tier.save(NAMESPACE, records(NAMESPACE, HASHES))
        assert watcher.here == {("disk", block_hash) for block_hash in HASHES}
        tier.drop(DROP)
        assert watcher.here == set()
    finally:
        tier.close()


def test_redis_tells_of_what_is_missed(redis_server: RedisServer) -> None:
    tier, watcher = RedisTier(redis_server.url, 5.0), Watcher()
    try:
        tier.watch(watcher)
        tier.save(NAMESPACE, records(NAMESPACE, HASHES))
        assert watcher.here == {("redis", block_hash) for block_hash in HASHES}
        assert len(tier.load(NAMESPACE, HASHES).records) == 4
        (other,) = chain(NAMESPACE, "other", 1)
        tier.load(NAMESPACE, [other])
        assert watcher.heard[-1] == ("removed", "redis", 1)
        tier.drop(DROP)
        tier.load(NAMESPACE, HASHES)
        assert watcher.here == set()
    finally:
        tier.close()


def test_a_store_tells_of_what_a_tier_holds_already_and_of_drops() -> None:
    tiers: list[Tier] = [RamTier(2**20)]
    store, first, second = TieredStore(tiers, lambda: None), Watcher(), Watcher()
    try:
        store.watch(first)
        store.watch(second)
        store.save(NAMESPACE, blocks(NAMESPACE, HASHES[:2]), is_urgent=True)
        assert store.flush(10)
        store.save(NAMESPACE, blocks(NAMESPACE, HASHES))
        assert store.flush(10)
        store.drop(DROP)
        assert store.flush(10)
    finally:
        store.close()
    assert first.heard == second.heard
    saves = ("stored", "already_stored", "stored")
    assert first.heard[:3] == [(save, "ram", 2) for save in saves]
    assert first.heard[-1] == ("dropped", "ram", 0)
    assert first.here == set()
