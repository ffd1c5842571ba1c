"""Several watchers of tiers as one."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Drop, TierNamespace, TierWatcher


class Watchers:
    """A `TierWatcher` that passes all it hears on. Added to before anything is stored."""

    def __init__(self) -> None:
        self._watchers: list[TierWatcher] = []

    def add(self, watcher: TierWatcher) -> bool:
        """Whether it is the first."""
        self._watchers.append(watcher)
        return len(self._watchers) == 1

    def stored(self, tier: str, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        for watcher in self._watchers:
            watcher.stored(tier, namespace, hashes)

    def already_stored(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        for watcher in self._watchers:
            watcher.already_stored(tier, hashes)

    def removed(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        for watcher in self._watchers:
            watcher.removed(tier, hashes)

    def dropped(self, tier: str, drop: Drop) -> None:
        for watcher in self._watchers:
            watcher.dropped(tier, drop)
