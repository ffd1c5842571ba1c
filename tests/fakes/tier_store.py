"""Tiers in a dictionary: late, lossy or silent when told to be, and alive across engines.

It never lies: a block that it gives is the block that was saved. What refuses wrong bytes is the
real store's codec.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import (
    Cause,
    FetchResult,
    TierContents,
    TierFigures,
    TierNamespace,
    TierStats,
)

TIERS = ("ram", "disk")


@dataclass
class Faults:
    """Chances, of 1. delay: looks at the results before one is there. silent: one never is."""

    delay: int = 0
    silent: float = 0.0
    loses_saves: float = 0.0
    loses_fetches: float = 0.0
    fails: float = 0.0


@dataclass
class _Pending:
    wait: int
    result: FetchResult


@dataclass
class FakeTierStore:
    """Blocks by root and hash, as they were saved; the second half of a run counts as on disk.

    holds_drops: forget nothing yet when told to, as a store may that is busy.
    """

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: Faults = field(default_factory=Faults)
    blocks: dict[bytes, dict[BlockHash, bytes]] = field(default_factory=dict)
    namespaces: dict[bytes, TierNamespace] = field(default_factory=dict)
    pending: dict[int, _Pending] = field(default_factory=dict)
    fetched: list[tuple[BlockHash, ...]] = field(default_factory=list)
    num_cancelled: int = 0
    holds_drops: bool = False
    is_closed: bool = False

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

    def save(self, namespace: TierNamespace, blocks: Sequence[tuple[BlockHash, bytes]]) -> None:
        for block_hash, data in blocks:
            assert len(data) == namespace.block_bytes, "a block of another size"
            if self.rng.random() >= self.faults.loses_saves:
                self.namespaces[namespace.root] = namespace
                self.blocks.setdefault(namespace.root, {})[block_hash] = data

    def drop_adapter(self, lora_name: str, keep: tuple[bytes, int] | None = None) -> None:
        for root, namespace in list(self.namespaces.items()):
            if namespace.is_dropped_with(lora_name, keep) and not self.holds_drops:
                del self.namespaces[root], self.blocks[root]

    def clear(self) -> None:
        self.namespaces.clear()
        self.blocks.clear()

    def stats(self) -> TierStats:
        return TierStats(tuple(_figures(tier, self.num_blocks) for tier in TIERS))

    def close(self) -> None:
        self.is_closed = True

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.blocks.values()))

    def restarted(self) -> FakeTierStore:
        """The same blocks before another engine."""
        return replace(self, pending={}, fetched=[], num_cancelled=0, is_closed=False)

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
    return TierFigures(
        tier=tier,
        contents=TierContents(num_blocks=num_blocks),
        hits=3,
        hit_bytes=300,
        misses={"absent": 2},
        num_saved=num_blocks,
        saved_bytes=100 * num_blocks,
        unsaved={"queue_full": 1},
        load_seconds=(1, 2, *([0] * 10)),
        load_seconds_sum=0.5,
        save_seconds=(0, 1, *([0] * 10)),
        save_seconds_sum=0.25,
        load_breaker="closed",
        save_breaker="open",
        num_trips=1,
    )
