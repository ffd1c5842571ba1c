"""Tiers in a dictionary: late, lossy or silent on demand, and alive across engines.

It never lies: a block that it gives is the block that was saved. Wrong bytes are refused by the
real store's codec.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lora_serve.engine_stats import TierContents, TierFigures
from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Cause, Drop, FetchResult, TierNamespace, TierStats, TierWatcher
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.kv_tiers.watchers import Watchers

TIERS = ("ram", "disk")


@dataclass
class Faults:
    """Probabilities. delay: polls before a result is there. silent: it never is."""

    delay: int = 0
    silent: float = 0.0
    loses_saves: float = 0.0
    loses_fetches: float = 0.0
    fails: float = 0.0
    evicts: float = 0.0


@dataclass
class _Pending:
    wait: int
    result: FetchResult


@dataclass
class OracleTierStore:
    """Blocks by root and hash, as they were saved; the second half of a run counts as on disk.

    holds_drops: put every drop off, as a store may that is busy.
    own_hashes: what this engine has saved, and is still there.
    """

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: Faults = field(default_factory=Faults)
    blocks: dict[bytes, dict[BlockHash, bytes]] = field(default_factory=dict)
    namespaces: dict[bytes, TierNamespace] = field(default_factory=dict)
    pending: dict[int, _Pending] = field(default_factory=dict)
    fetched: list[tuple[BlockHash, ...]] = field(default_factory=list)
    touched: list[tuple[BlockHash, ...]] = field(default_factory=list)
    num_cancelled: int = 0
    holds_drops: bool = False
    num_not_asked: int = 0
    is_closed: bool = False
    watcher: Watchers | None = None
    own_hashes: dict[BlockHash, TierNamespace] = field(default_factory=dict)

    def watch(self, watcher: TierWatcher) -> None:
        if self.watcher is None:
            self.watcher = Watchers()
        self.watcher.add(watcher)

    def may_have(self, namespace: TierNamespace, first: BlockHash) -> bool:
        return first in self.blocks.get(namespace.root, {})

    def fetch(
        self,
        ticket: int,
        namespace: TierNamespace,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
    ) -> None:
        assert ticket not in self.pending, "a ticket is used twice"
        self.fetched.append(tuple(hashes))
        if self.rng.random() < self.faults.silent:
            return
        self.pending[ticket] = _Pending(self.faults.delay, self._result(ticket, namespace, hashes))

    def cancel(self, ticket: int) -> None:
        self.num_cancelled += 1
        self.pending.pop(ticket, None)

    def take_results(self) -> list[FetchResult]:
        ready = [ticket for ticket, pending in self.pending.items() if pending.wait <= 0]
        for pending in self.pending.values():
            pending.wait -= 1
        return [self.pending.pop(ticket).result for ticket in ready]

    def not_asked(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        assert hashes, "a note of nothing"
        self.num_not_asked += len(hashes)

    def save(
        self,
        namespace: TierNamespace,
        blocks: Sequence[tuple[BlockHash, bytes]],
        *,
        is_urgent: bool = False,
    ) -> None:
        for block_hash, data in blocks:
            assert len(data) == namespace.block_bytes, "a block of another size"
            if self.rng.random() >= self.faults.loses_saves:
                self.namespaces[namespace.root] = namespace
                self.blocks.setdefault(namespace.root, {})[block_hash] = data
                self._note_saved(namespace, block_hash)
        if self.faults.evicts and self.rng.random() < self.faults.evicts:
            self._evict()

    def _note_saved(self, namespace: TierNamespace, block_hash: BlockHash) -> None:
        self.own_hashes[block_hash] = namespace
        if self.watcher is not None:
            for tier in TIERS:
                self.watcher.stored(tier, namespace, [block_hash])

    def _evict(self) -> None:
        """Forget the block that was saved first of those that this engine has saved."""
        for block_hash, namespace in self.own_hashes.items():
            del self.blocks[namespace.root][block_hash], self.own_hashes[block_hash]
            if self.watcher is not None:
                for tier in TIERS:
                    self.watcher.removed(tier, [block_hash])
            return

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        self.touched.append(tuple(hashes))

    def drop(self, drop: Drop) -> Forgetting:
        if self.holds_drops:
            forgetting = Forgetting(("disk",))
            forgetting.failed("disk", "it is busy")
            return forgetting
        for root, namespace in list(self.namespaces.items()):
            if drop.takes(namespace):
                del self.namespaces[root], self.blocks[root]
        self.own_hashes = {h: its for h, its in self.own_hashes.items() if not drop.takes(its)}
        if self.watcher is not None:
            for tier in TIERS:
                self.watcher.dropped(tier, drop)
        return Forgetting()

    def stats(self) -> TierStats:
        return TierStats(tuple(_figures(tier, self.num_blocks) for tier in TIERS))

    def close(self) -> None:
        self.is_closed = True

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.blocks.values()))

    def restarted(self) -> OracleTierStore:
        """The same blocks for another engine."""
        return replace(
            self,
            pending={},
            fetched=[],
            touched=[],
            num_cancelled=0,
            is_closed=False,
            watcher=None,
            own_hashes={},
        )

    def _result(
        self, ticket: int, namespace: TierNamespace, hashes: Sequence[BlockHash]
    ) -> FetchResult:
        if self.rng.random() < self.faults.fails:
            return FetchResult(ticket, causes={"disk": Cause.CHECKSUM})
        found: list[memoryview] = []
        for block_hash in hashes:
            data = self.blocks.get(namespace.root, {}).get(block_hash)
            if data is None or self.rng.random() < self.faults.loses_fetches:
                break
            found.append(memoryview(data))
        num_in_ram = len(found) // 2
        return FetchResult(
            ticket, tuple(found), {"ram": num_in_ram, "disk": len(found) - num_in_ram}
        )


def _figures(tier: str, num_blocks: int) -> TierFigures:
    """Names the tier; no other figure is read here."""
    return TierFigures(
        tier=tier,
        contents=TierContents(num_blocks=num_blocks),
        hits=0,
        hit_bytes=0,
        misses={},
        num_saved=0,
        saved_bytes=0,
        unsaved={},
        load_seconds=(),
        load_seconds_sum=0.0,
        save_seconds=(),
        save_seconds_sum=0.0,
        load_breaker="closed",
        save_breaker="closed",
        num_trips=0,
    )
