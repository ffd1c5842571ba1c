"""A real tier that fails when a test wants it to, or by chance from a seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from lora_serve.engine_stats import TierContents
from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import (
    Cause,
    Drop,
    Loaded,
    Record,
    Tier,
    TierError,
    TierNamespace,
    TierWatcher,
)

FAULTS = ("", "error", "bug", "miss", "short")


class FaultyTier:
    """Set `fault` to what every call does from now on; "" for what the real tier does.

    error: it cannot be used. bug: an exception that no tier should raise. miss: it has nothing.
    short: loads give one block at a time. hang: calls wait until `release`.
    """

    def __init__(self, tier: Tier, chance: random.Random | None = None) -> None:
        """Have each call draw its fault, if `chance` is given."""
        self.name = tier.name
        self.traits = tier.traits
        self.fault = ""
        self.num_calls = 0
        self._tier = tier
        self._chance = chance
        self._released = threading.Event()

    def release(self) -> None:
        """End what hangs, and hang no more."""
        self.fault = ""
        self._released.set()

    def _meet_fault(self) -> str:
        self.num_calls += 1
        fault = self._chance.choice(FAULTS) if self._chance else self.fault
        if fault == "error":
            raise TierError("a test made it fail")
        if fault == "bug":
            raise ZeroDivisionError("a test made it wrong")
        if fault == "hang":
            assert self._released.wait(30), "it was not released"
        return fault

    def holds(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        return self._tier.holds(namespace, block_hash)

    def may_hold(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        return self._tier.may_hold(namespace, block_hash)

    def load(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> Loaded:
        match self._meet_fault():
            case "miss":
                return Loaded(cause=Cause.ABSENT)
            case "short":
                return self._tier.load(namespace, hashes[:1])
        return self._tier.load(namespace, hashes)

    def save(self, namespace: TierNamespace, records: Sequence[Record]) -> int:
        self._meet_fault()
        return self._tier.save(namespace, records)

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        self._meet_fault()
        self._tier.touch(namespace, hashes)

    def drop(self, drop: Drop) -> None:
        self._meet_fault()
        self._tier.drop(drop)

    def watch(self, watcher: TierWatcher) -> None:
        self._tier.watch(watcher)

    def contents(self) -> TierContents:
        return self._tier.contents()

    def close(self) -> None:
        self._tier.close()
