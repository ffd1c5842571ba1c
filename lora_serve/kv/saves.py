"""Blocks on their way to the tiers: committed, then gathered by a step, then handed over.

A block's content is certain from its commit to the next step, which gathers it before anything is
written. `forget` reaches blocks in both places, so that KV that was reset is never stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lora_serve.identity import EVERYTHING, BlockHash, Everything
from lora_serve.kv.block_table import BlockTable
from lora_serve.kv_tiers.base import TierNamespace


@dataclass(slots=True, eq=False)
class SaveRun:
    """Consecutive places of one chain. is_wanted: until the cache is reset under it.

    is_urgent: another server waits for them.
    block_ids: for each place those of all groups, one after the other.
    """

    namespace: TierNamespace
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]
    is_urgent: bool = False
    is_wanted: bool = True


class PendingSaves:
    """Runs that the next step gathers, and runs that steps before are gathering."""

    def __init__(self) -> None:
        self._next: list[SaveRun] = []
        self._gathering: deque[list[SaveRun]] = deque()  # by step, oldest first

    def add(
        self,
        namespace: TierNamespace,
        hashes: Sequence[BlockHash],
        tables: Sequence[BlockTable],
        blocks: Sequence[int],
        *,
        is_urgent: bool = False,
    ) -> None:
        """Save these of a request's blocks: ascending indices into its hashes and tables."""
        for first, last in _runs(blocks):
            chosen = slice(first, last + 1)
            places = zip(*(table.block_ids[chosen] for table in tables), strict=True)
            block_ids = tuple(block_id for place in places for block_id in place)
            self._next.append(SaveRun(namespace, tuple(hashes[chosen]), block_ids, is_urgent))

    def plan(self) -> tuple[int, ...]:
        """The blocks that this step gathers; `gathered` must follow once it has run."""
        runs = [run for run in self._next if run.is_wanted]
        self._next = []
        if runs:
            self._gathering.append(runs)
        return tuple(block_id for run in runs for block_id in run.block_ids)

    def gathered(
        self, blobs: Sequence[bytes]
    ) -> Iterator[tuple[SaveRun, list[tuple[BlockHash, bytes]]]]:
        """The records that the oldest step with saves gathered, but for those reset meanwhile."""
        if not blobs:
            return
        runs = self._gathering.popleft()
        assert len(blobs) == sum(len(run.hashes) for run in runs), "a step gathered other blocks"
        start = 0
        for run in runs:
            end = start + len(run.hashes)
            if run.is_wanted:
                yield run, list(zip(run.hashes, blobs[start:end], strict=True))
            start = end

    def forget(self, lora_name: str | Everything) -> None:
        """Hand over nothing more of one adapter, or of EVERYTHING."""
        for run in (*self._next, *(run for runs in self._gathering for run in runs)):
            if lora_name is EVERYTHING or run.namespace.lora_name == lora_name:
                run.is_wanted = False


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The (first, last) of each run of consecutive numbers."""
    first = previous = None
    for block in blocks:
        if first is None or previous is None:
            first = block
        elif block != previous + 1:
            yield first, previous
            first = block
        previous = block
    if first is not None and previous is not None:
        yield first, previous
