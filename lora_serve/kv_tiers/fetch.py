"""One fetch on its way through the tiers: what was asked for, and what was loaded so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Cause, FetchResult, Record, TierNamespace


@dataclass(slots=True, eq=False)
class Fetch:
    """Changed under the store's lock only; reader threads read only what does not change.

    deadline: in time.monotonic(). num_drops: of the store, when the fetch began.
    tier: which tier it waits for now, since queued_at.
    causes: by tier, why it had no more, and how many blocks were wanted then.
    """

    ticket: int
    namespace: TierNamespace
    hashes: Sequence[BlockHash]
    deadline: float
    num_drops: int
    records: list[Record] = field(default_factory=list)
    num_blocks_by_tier: dict[str, int] = field(default_factory=dict)
    causes: dict[str, tuple[Cause, int]] = field(default_factory=dict)
    tier: str = ""
    queued_at: float = 0.0
    is_over: bool = False

    @property
    def wanted(self) -> Sequence[BlockHash]:
        return self.hashes[len(self.records) :]

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def add(self, tier: str, records: Sequence[Record]) -> None:
        self.records += records
        self.num_blocks_by_tier[tier] = self.num_blocks_by_tier.get(tier, 0) + len(records)

    def missed(self, tier: str, cause: Cause) -> None:
        """Note that the tier has no more; only its first time counts."""
        self.causes.setdefault(tier, (cause, len(self.wanted)))

    def result(self) -> FetchResult:
        blocks = tuple(memoryview(record.payload) for record in self.records)
        causes = {tier: cause for tier, (cause, _) in self.causes.items()} if self.wanted else {}
        return FetchResult(self.ticket, blocks, self.num_blocks_by_tier, causes)
