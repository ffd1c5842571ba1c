"""A consumer of KV events that believes what it is told, and tells what it must never be told.

Like the indexers of gateways it knows adapters by name. It is held against the pool and the tiers
of the engine at each step's end, and, event by event, against the chains that were hashed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from lora_serve.identity import (
    BASE_MODEL,
    Activation,
    BlockHash,
    BlockHasher,
    CacheNamespace,
)
from lora_serve.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Medium
from lora_serve.kv.tier_copies import Version

Known = tuple[Medium, int, BlockHash]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a block's hash was made of. parent: None of a chain's first."""

    namespace: CacheNamespace
    parent: BlockHash | None
    token_ids: tuple[int, ...]


class RecordingHasher(BlockHasher):
    """Notes the origin of every hash that another hasher makes."""

    def __init__(self, hasher: BlockHasher, origins: dict[BlockHash, Origin]) -> None:
        self._hasher = hasher
        self._origins = origins
        self._namespaces: dict[BlockHash, CacheNamespace] = {}  # by root

    def root(self, namespace: CacheNamespace) -> BlockHash:
        root = self._hasher.root(namespace)
        self._namespaces[root] = namespace
        return root

    def extend(
        self,
        parent: BlockHash,
        token_ids: Sequence[int],
        embeds_digest: bytes = b"",
        activation: Activation | None = None,
    ) -> BlockHash:
        block_hash = self._hasher.extend(parent, token_ids, embeds_digest, activation)
        namespace = self._namespaces.get(parent)
        before = None if namespace is not None else parent
        namespace = namespace or self._origins[parent].namespace
        if activation is not None:
            namespace = activation.namespace
        self._origins[block_hash] = Origin(namespace, before, tuple(token_ids))
        return block_hash


class OracleIndexer:
    """Lives longer than an engine. blocks: all that it would look for, and where."""

    def __init__(self, block_size: int) -> None:
        self.origins: dict[BlockHash, Origin] = {}
        self.blocks: set[Known] = set()
        self.num_events: Counter[str] = Counter()
        self._block_size = block_size
        self._versions: dict[str | None, Counter[Version]] = {}  # of the blocks, by lora_name
        self._described: set[BlockHash] = set()  # with tokens, since all were cleared

    def take_in(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            self.num_events[type(event).__name__] += 1
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        self._remove((event.medium, event.group, block_hash))
                case AllBlocksCleared():
                    self.blocks.clear()
                    self._versions.clear()
                    self._described.clear()

    def check(self, on_device: set[Known], in_tiers: set[Known]) -> None:
        """Assert that what is known is exactly what can be found.

        Of what lies in tiers, only blocks that are known on the device, too, must be known.
        """
        device = {known for known in self.blocks if known[0] is Medium.GPU}
        tiers = self.blocks - device
        assert device <= on_device, f"told of {device - on_device}, which is not found"
        assert on_device <= device, f"not told of {on_device - device}"
        assert tiers <= in_tiers, f"told of {tiers - in_tiers}, which is in no tier"
        hashes = {known[2] for known in on_device}
        untold = {known for known in in_tiers - tiers if known[2] in hashes}
        assert not untold, f"not told of {untold}"

    def _store(self, event: BlockStored) -> None:
        assert event.block_hashes, "an event of nothing"
        if event.token_ids:
            self._describe(event)
        for block_hash in event.block_hashes:
            known = event.medium, event.group, block_hash
            assert known not in self.blocks, f"told of {known} twice"
            assert block_hash in self._described, f"{known} has no tokens yet"
            version = self.origins[block_hash].namespace.adapter
            name = None if version is BASE_MODEL else version.name
            assert event.namespace.lora_name == name, f"{known} is another adapter's"
            versions = self._versions.setdefault(name, Counter())
            assert not versions or set(versions) == {version}, f"{name}: two versions at once"
            versions[version] += 1
            self.blocks.add(known)

    def _describe(self, event: BlockStored) -> None:
        size, parent = self._block_size, event.parent
        for index, block_hash in enumerate(event.block_hashes):
            origin = self.origins[block_hash]
            assert origin.parent == parent, "a block that does not follow the one before"
            tokens = event.token_ids[index * size : (index + 1) * size]
            assert origin.token_ids == tuple(tokens), "tokens of another block"
            assert bool(origin.namespace.cache_salt) == bool(event.namespace.salt), "salt"
            parent = block_hash
        self._described.update(event.block_hashes)

    def _remove(self, known: Known) -> None:
        assert known in self.blocks, f"{known} was removed and never told of"
        self.blocks.remove(known)
        version = self.origins[known[2]].namespace.adapter
        name = None if version is BASE_MODEL else version.name
        self._versions[name][version] -= 1
        if not self._versions[name][version]:
            del self._versions[name][version]


class OraclePublisher:
    """Hands each batch to the indexer; now and then it has no room for one."""

    def __init__(self, indexer: OracleIndexer, rng: Random, loses: float) -> None:
        self.num_batches = self.num_lost = self.num_replays = 0
        self._indexer = indexer
        self._rng = rng
        self._loses = loses

    @property
    def has_caught_up(self) -> bool:
        return self._rng.random() < 0.5

    def publish(self, events: Sequence[KVEvent]) -> bool:
        self.num_batches += 1
        if self._rng.random() < self._loses:
            self.num_lost += 1
            return False
        self._indexer.take_in(events)
        return True

    def close(self) -> None:
        pass
