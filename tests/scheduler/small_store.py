"""KV tiers small enough to visit every state of them, behind the real connector.

The store may have whatever it is asked for. What comes of a fetch is the world's choice: some of
the blocks, none, a failure, a result that is not wanted any more, or nothing at all until the
connector gives it up. Nothing is saved, which no request waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from lora_serve.config import KVTierConfig
from lora_serve.fuzz.oracle.executor import oracle_model
from lora_serve.identity import BlockHash, BlockHasher, CacheNamespace
from lora_serve.kv.tiered_connector import GIVE_UP_FACTOR, TieredConnector, tier_namespaces
from lora_serve.kv_tiers.base import (
    Cause,
    Drop,
    FetchResult,
    TierNamespace,
    TierStats,
    TierWatcher,
)
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.scheduler.request import Request

DEADLINE_MS = 10**9  # time passes by a second a fetch, but for the fetches that hang
BLOCK = b"01"  # a record, which one group or two may divide
HASHER = BlockHasher("xxh3_128")
MODEL = oracle_model(num_blocks=1)


@cache
def tier_namespace(namespace: CacheNamespace) -> TierNamespace:
    return tier_namespaces(HASHER, MODEL)(namespace)


class SmallStore:
    """asked: how many blocks each fetch wants, by ticket. due: when each will be given up.

    results: what the connector has not taken in yet. cancelled: the fetch that was cancelled last,
    whose result may come all the same.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: dict[int, int] = {}
        self.due: dict[int, float] = {}
        self.results: list[FetchResult] = []
        self.cancelled: int | None = None

    def clock(self) -> float:
        return self.now

    def watch(self, watcher: TierWatcher) -> None:
        """Nothing is saved, so there is nothing to tell of."""

    # ── what the world does ─────────────────────────────────────────────────────────────────

    def give(self, ticket: int, num_blocks: int) -> None:
        causes = {"tier": Cause.ABSENT} if num_blocks < self.asked[ticket] else {}
        self._end(FetchResult(ticket, (BLOCK,) * num_blocks, {"tier": num_blocks}, causes))

    def fail(self, ticket: int) -> None:
        self._end(FetchResult(ticket, causes={"tier": Cause.ERROR}))

    def hang(self, ticket: int) -> None:
        """It gives no sign until its time is up."""
        self.now = max(self.now, self.due[ticket])

    def give_late(self) -> None:
        """What was cancelled last was on its way, and comes."""
        assert self.cancelled is not None, "nothing was cancelled"
        self.results.append(FetchResult(self.cancelled, (BLOCK,), {"tier": 1}))
        self.cancelled = None

    def _end(self, result: FetchResult) -> None:
        del self.asked[result.ticket], self.due[result.ticket]
        self.results.append(result)

    # ── what the connector asks ─────────────────────────────────────────────────────────────

    def may_have(self, namespace: TierNamespace, first: BlockHash) -> bool:
        return True

    def fetch(
        self,
        ticket: int,
        namespace: TierNamespace,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
    ) -> None:
        self.asked[ticket] = len(hashes)
        self.due[ticket] = self.now + GIVE_UP_FACTOR * deadline_seconds
        self.now += 1.0  # so that no two are given up at once unless the world lets both hang

    def cancel(self, ticket: int) -> None:
        if self.asked.pop(ticket, None) is not None:
            del self.due[ticket]
            self.cancelled = ticket

    def take_results(self) -> list[FetchResult]:
        results, self.results = self.results, []
        return results

    def not_asked(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        pass

    def save(self, namespace: TierNamespace, blocks: Sequence[tuple[BlockHash, bytes]]) -> None:
        raise AssertionError("nothing is to be saved here")

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        pass

    def drop(self, drop: Drop) -> Forgetting:
        return Forgetting()

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        pass


def connector_over(
    store: SmallStore,
    *,
    failure_policy: str = "recompute",
    max_fetched_blocks: int = 2,
    connector_class: type[TieredConnector[Request]] = TieredConnector,
) -> TieredConnector[Request]:
    config = KVTierConfig(
        kv_load_deadline_ms=DEADLINE_MS,
        kv_load_failure_policy=failure_policy,
        kv_store_policy="after-n-hits",
        kv_store_min_hits=10**9,
    )
    return connector_class(
        config,
        store,
        MODEL.fingerprint,
        tier_namespace,
        len(BLOCK),
        store.clock,
        max_fetched_blocks * len(BLOCK),
    )
