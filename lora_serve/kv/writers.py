"""Which running request is computing which block, and which requests wait for it.

Defer, don't duplicate: a request whose next block is being written waits for the commit instead
of computing the same prefix again. If the writer dies, its waiters are woken and one of them
becomes the writer. A waiter never holds blocks, and a writer never waits, so no requests
wait in a circle.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from lora_serve.identity import BlockHash

Who = TypeVar("Who", bound=Hashable)


class PendingWrites(Generic[Who]):
    """Blocks on their way into the cache. Cost: O(1) a block, whatever the number of waiters."""

    def __init__(self) -> None:
        self._writer: dict[BlockHash, Who] = {}
        self._writes: dict[Who, dict[BlockHash, None]] = {}
        self._waiters: dict[BlockHash, dict[Who, None]] = {}
        self._awaited: dict[Who, BlockHash] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._awaited)

    def announce(self, writer: Who, hashes: Sequence[BlockHash]) -> None:
        """Note that `writer` will compute these blocks, but for those that another announced."""
        for block_hash in hashes:
            if self._writer.setdefault(block_hash, writer) == writer:
                self._writes.setdefault(writer, {})[block_hash] = None

    def shared_until(self, hashes: Sequence[BlockHash], start: int, stop: int) -> BlockHash | None:
        """Find the last of hashes[start:stop] that the writer of hashes[start] computes.

        None if no request computes that one. Waiting for the last wakes a waiter once, not once a
        block. A writer computes a run of its chain, so the last is found by bisection.
        """
        writer = self._writer.get(hashes[start]) if start < stop else None
        if writer is None:
            return None
        # hashes[low] is the writer's; nothing from hashes[high] on is.
        low, high = start, stop
        while high - low > 1:
            middle = (low + high) // 2
            if self._writer.get(hashes[middle]) == writer:
                low = middle
            else:
                high = middle
        return hashes[low]

    def wait(self, waiter: Who, block_hash: BlockHash) -> None:
        assert block_hash in self._writer, "waiting for a block that is not being written"
        self._waiters.setdefault(block_hash, {})[waiter] = None
        self._awaited[waiter] = block_hash

    def written(self, writer: Who, hashes: Sequence[BlockHash]) -> list[Who]:
        """Note that these blocks are committed; returns the requests that waited for them."""
        woken: list[Who] = []
        for block_hash in hashes:
            if self._writer.get(block_hash) == writer:
                woken += self._settle(block_hash)
        return woken

    def withdraw(self, writer: Who) -> list[Who]:
        """Take back what `writer` announced; returns the requests that waited for it."""
        woken: list[Who] = []
        for block_hash in list(self._writes.get(writer, ())):
            woken += self._settle(block_hash)
        return woken

    def stop_waiting(self, waiter: Who) -> bool:
        """Forget a waiter; False if it did not wait."""
        block_hash = self._awaited.pop(waiter, None)
        if block_hash is None:
            return False
        waiters = self._waiters[block_hash]
        del waiters[waiter]
        if not waiters:
            del self._waiters[block_hash]
        return True

    def _settle(self, block_hash: BlockHash) -> list[Who]:
        writer = self._writer.pop(block_hash)
        writes = self._writes[writer]
        del writes[block_hash]
        if not writes:
            del self._writes[writer]
        woken = list(self._waiters.pop(block_hash, ()))
        for waiter in woken:
            del self._awaited[waiter]
        return woken

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        by_writer = {h: who for who, hashes in self._writes.items() for h in hashes}
        assert by_writer == self._writer, "writers and their writes disagree"
        awaited = {who: h for h, waiters in self._waiters.items() for who in waiters}
        assert awaited == self._awaited, "waiters and what they await disagree"
        assert set(self._waiters) <= set(self._writer), (
            "a block is awaited that is not being written"
        )
        assert not set(self._awaited) & set(self._writes), "a writer waits"
