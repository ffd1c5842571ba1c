"""Requests that another server is to go on with: how much of their prompts' KV it can find by now.

A handover begins when a request is admitted, and is over when all blocks of its prompt that can be
found lie in a tier that other servers look into. How long that is waited for is the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from lora_serve.identity import BlockHash
from lora_serve.kv.tier_copies import MEMORY_TIERS
from lora_serve.kv_tiers.base import Drop, TierNamespace


@dataclass(slots=True, eq=False)
class Handover:
    """hashes: of the prompt's blocks, in their order. num_offered: how many the tiers were given.

    missing: those of which no tier has said that it has them.
    """

    hashes: tuple[BlockHash, ...]
    num_offered: int = 0
    missing: set[BlockHash] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = set(self.hashes)

    @property
    def num_stored(self) -> int:
        """How many blocks, from the first on, are there."""
        ends = (i for i, block_hash in enumerate(self.hashes) if block_hash in self.missing)
        return next(ends, len(self.hashes))


class Handovers:
    """A `TierWatcher`. `notify` is called from the tiers' threads while something is awaited."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._reports: deque[Sequence[BlockHash]] = deque()  # one end each for two threads
        self._handovers: dict[str, Handover] = {}
        self._awaited: dict[BlockHash, dict[str, None]] = {}  # by which requests

    # ── from any thread ─────────────────────────────────────────────────────────────────────

    def stored(self, tier: str, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        self.already_stored(tier, hashes)

    def already_stored(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        if tier not in MEMORY_TIERS and self._handovers:
            self._reports.append(tuple(hashes))
            self._notify()

    def removed(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        """Nothing: the other server computes what it does not find."""

    def dropped(self, tier: str, drop: Drop) -> None:
        """Nothing, for the same reason."""

    # ── from the engine's ───────────────────────────────────────────────────────────────────

    def begin(self, request_id: str, hashes: Sequence[BlockHash]) -> Handover:
        """Wait for these blocks; a request that begins again keeps what it knows."""
        handover = self._handovers.get(request_id)
        if handover is None:
            handover = self._handovers[request_id] = Handover(tuple(hashes))
            for block_hash in hashes:
                self._awaited.setdefault(block_hash, {})[request_id] = None
        handover.num_offered = 0
        return handover

    def get(self, request_id: str) -> Handover | None:
        """The handover as it stands now; None if it has not begun."""
        self._take_in()
        return self._handovers.get(request_id)

    def request_ids(self) -> Collection[str]:
        return self._handovers.keys()

    def end(self, request_id: str) -> None:
        """Stop waiting for a request's blocks."""
        handover = self._handovers.pop(request_id, None)
        for block_hash in () if handover is None else handover.missing:
            self._forget(block_hash, request_id)

    def _take_in(self) -> None:
        while self._reports:
            for block_hash in self._reports.popleft():
                for request_id in self._awaited.pop(block_hash, ()):
                    self._handovers[request_id].missing.discard(block_hash)

    def _forget(self, block_hash: BlockHash, request_id: str) -> None:
        waiting = self._awaited[block_hash]
        del waiting[request_id]
        if not waiting:
            del self._awaited[block_hash]
