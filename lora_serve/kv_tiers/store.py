"""All tiers as one store: a fetch goes from the first to the last, saves go to all of them.

Every method returns at once (but `flush` and `close`); the work is done in threads, and results
wait in a queue until the engine takes them. A tier that fails, hangs or lies is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import (
    Cause,
    Drop,
    FetchResult,
    Loaded,
    Record,
    Tier,
    TierNamespace,
    TierStats,
    TierWatcher,
)
from lora_serve.kv_tiers.codec import NO_KEYS, make_record
from lora_serve.kv_tiers.deadlines import Deadlines
from lora_serve.kv_tiers.fetch import Fetch
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.kv_tiers.lane import TierLane
from lora_serve.kv_tiers.mac import MacKeys
from lora_serve.kv_tiers.save_queue import Batch, SaveQueue
from lora_serve.kv_tiers.watchers import Watchers

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 * 2**20  # what may wait to be saved, for each tier and before them
BATCH_BYTES = 32 * 2**20  # what a tier is given at once, if that much comes in time
IDLE_SECONDS = 60.0

Item = tuple[BlockHash, bytes]


class TieredStore:
    """`tiers` in the order in which they are asked; `notify` is called when results are there.

    keys: what is saved is signed with the first of them.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        notify: Callable[[], None],
        *,
        keys: MacKeys = NO_KEYS,
        close_seconds: float = 10.0,
    ) -> None:
        self._keys = keys
        self._close_seconds = close_seconds
        self._notify = notify
        self._watchers = Watchers()
        self._lock = threading.Lock()
        self._fetches: dict[int, Fetch] = {}
        self._results: list[FetchResult] = []
        self._num_late = 0
        self._num_drops = 0
        self._is_closed = False
        self._incoming: SaveQueue[Item] = SaveQueue(QUEUE_BYTES, BATCH_BYTES, 0.0)
        self._lanes = [self._lane(tier) for tier in tiers]
        self._deadlines = Deadlines(self._expire)
        self._encoder = threading.Thread(target=self._encode, name="kv-encode", daemon=True)
        self._encoder.start()

    def _lane(self, tier: Tier) -> TierLane:
        traits = tier.traits
        saves: SaveQueue[Record] = SaveQueue(QUEUE_BYTES, BATCH_BYTES, traits.linger_seconds)
        return TierLane(tier, saves, traits.num_readers, self._deliver)

    def watch(self, watcher: TierWatcher) -> None:
        """Tell `watcher` of all tiers' blocks. Before anything is saved."""
        if self._watchers.add(watcher):
            for lane in self._lanes:
                lane.watch(self._watchers)

    # ── fetching ────────────────────────────────────────────────────────────────────────────

    def may_have(self, namespace: TierNamespace, first: BlockHash) -> bool:
        """Whether a fetch that begins with this block is worth waiting for."""
        return any(lane.obstacle(namespace, first) is None for lane in self._lanes)

    def fetch(
        self,
        ticket: int,
        namespace: TierNamespace,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
    ) -> None:
        """Bring the longest run of blocks from `hashes[0]` on that the tiers have.

        One result follows for each ticket, at the deadline the latest, with what has come by
        then; none after `cancel`.
        """
        deadline = time.monotonic() + deadline_seconds
        with self._lock:
            assert ticket not in self._fetches, f"ticket {ticket} is taken"
            fetch = Fetch(ticket, namespace, tuple(hashes), deadline, self._num_drops)
            self._fetches[ticket] = fetch
            is_done = self._is_closed or not self._advance(fetch, 0)
            if is_done:
                self._finish(fetch)
        if is_done:
            self._notify()
        else:
            self._deadlines.add(deadline, ticket)

    def cancel(self, ticket: int) -> None:
        """Give up a fetch that no request waits for any more."""
        with self._lock:
            fetch = self._fetches.pop(ticket, None)
            if fetch is not None:
                fetch.is_over = True

    def take_results(self) -> list[FetchResult]:
        """All results so far, those without blocks included. Never waits."""
        with self._lock:
            results, self._results = self._results, []
            return results

    def not_asked(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        """Count blocks that were computed without a fetch as misses of tiers whose breaker is open.

        A block that a tier is known not to have is not counted.
        """
        for lane in self._lanes:
            if lane.obstacle(namespace, hashes[0]) is Cause.BREAKER:
                lane.counters.miss(Cause.BREAKER, len(hashes))

    def _advance(self, fetch: Fetch, stage: int) -> bool:
        """Hand the fetch to the next tier that may have more of it; False if there is none."""
        if not fetch.wanted:
            return False
        for lane in self._lanes[stage:]:
            obstacle = lane.obstacle(fetch.namespace, fetch.wanted[0])
            if obstacle is None:
                fetch.tier, fetch.queued_at = lane.name, time.monotonic()
                lane.load(fetch)
                return True
            fetch.missed(lane.name, obstacle)
        return False

    def _deliver(self, lane: TierLane, fetch: Fetch, loaded: Loaded) -> None:
        """Take in what a tier had, from its reader thread; then ask the others for what follows."""
        with self._lock:
            if fetch.is_over:
                return
            lane.counters.hit(loaded.records)
            if loaded.records:
                fetch.add(lane.name, loaded.records)
            if loaded.cause is not None:
                fetch.missed(lane.name, loaded.cause)
            stage = 0 if loaded.records else self._lanes.index(lane) + 1
            if self._advance(fetch, stage):
                return
            self._finish(fetch)
        self._notify()

    def _expire(self, ticket: int) -> None:
        """End a fetch at its deadline, with what has been loaded."""
        with self._lock:
            fetch = self._fetches.get(ticket)
            if fetch is None:
                return
            lane = next(lane for lane in self._lanes if lane.name == fetch.tier)
            lane.give_up(fetch)
            fetch.missed(lane.name, Cause.DEADLINE)
            self._finish(fetch)
            self._num_late += 1
        self._notify()

    def _finish(self, fetch: Fetch) -> None:
        self._results.append(fetch.result())  # first: if this fails, the deadline tries again
        fetch.is_over = True
        del self._fetches[fetch.ticket]
        for lane in self._lanes:
            cause, num_blocks = fetch.causes.get(lane.name, (Cause.ABSENT, 0))
            if num_blocks and not cause.is_refusal:
                lane.counters.miss(cause, num_blocks)
        try:
            self._promote(fetch)
        except Exception:  # the fetch itself was fine
            logger.exception("saving fetched KV to the first tier failed")
            self._lanes[0].counters.unsaved(Cause.ERROR, len(fetch.records))

    def _promote(self, fetch: Fetch) -> None:
        """Put into the first tier what the others gave, unless something was dropped meanwhile."""
        lane = self._lanes[0]
        if not lane.takes_promoted or fetch.num_drops != self._num_drops:
            return
        new = [record for record in fetch.records if lane.lacks(fetch.namespace, record.block_hash)]
        if new:
            lane.save(fetch.namespace, new)

    # ── saving and dropping ─────────────────────────────────────────────────────────────────

    def save(
        self, namespace: TierNamespace, blocks: Sequence[Item], *, is_urgent: bool = False
    ) -> None:
        """Write consecutive blocks through to every tier, later; what finds no room is lost.

        is_urgent: no tier waits for more to write at once.
        """
        num_bytes = sum(len(block) for _, block in blocks)
        if not self._incoming.put(namespace, blocks, num_bytes, is_urgent=is_urgent):
            for lane in self._lanes:
                lane.counters.unsaved(Cause.QUEUE_FULL, len(blocks))

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        """Count blocks that were hit on the device as used in the tiers, too."""
        for lane in self._lanes:
            lane.touch(namespace, hashes)

    def drop(self, drop: Drop) -> Forgetting:
        """Forget KV. Once this has returned, this process finds nothing that `drop` takes.

        The result says when all tiers have forgotten for good. A tier that cannot do it now is
        asked again until it can.
        """
        forgetting = Forgetting((lane.name for lane in self._lanes), self._notify)
        with self._lock:
            self._num_drops += 1
            for lane in self._lanes:
                lane.hide(drop)

        def forget() -> None:
            for lane in self._lanes:
                lane.drop(drop, forgetting)

        self._incoming.put_task(forget, drop.takes)
        return forgetting

    def _encode(self) -> None:
        """Give blocks their headers, once for all tiers, in a thread of its own."""
        while not self._incoming.is_closed:
            taken = self._incoming.take(IDLE_SECONDS)
            if taken is None:
                continue
            try:
                if isinstance(taken, Batch):
                    self._encode_batch(taken)
                else:
                    taken()
            except Exception:  # a bug of ours must not end the thread
                logger.exception("saving KV failed")
            self._incoming.done()

    def _encode_batch(self, batch: Batch[Item]) -> None:
        records: dict[BlockHash, Record] = {}
        for lane in self._lanes:
            try:
                self._encode_for(lane, batch, records)
            except Exception:  # memory is short, or a bug of ours: the other tiers get theirs
                logger.exception("saving KV to the tier %s failed", lane.name)
                lane.counters.unsaved(Cause.ERROR, len(batch.items))

    def _encode_for(
        self, lane: TierLane, batch: Batch[Item], records: dict[BlockHash, Record]
    ) -> None:
        """Queue what the tier lacks. `records`: what was encoded so far, for any tier."""
        namespace, now = batch.namespace, time.time()
        lacking = [item for item in batch.items if lane.lacks(namespace, item[0])]
        if len(lacking) < len(batch.items):
            missing = {block_hash for block_hash, _ in lacking}
            there = [block_hash for block_hash, _ in batch.items if block_hash not in missing]
            lane.tell_already_stored(there)
        for block_hash, block in lacking:
            if block_hash not in records:
                records[block_hash] = make_record(namespace, block_hash, block, now, self._keys)
        if lacking:
            chosen = [records[block_hash] for block_hash, _ in lacking]
            lane.save(namespace, chosen, is_urgent=batch.is_urgent)

    # ── life ────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> TierStats:
        return TierStats(tuple(lane.figures() for lane in self._lanes), self._num_late)

    def flush(self, timeout_seconds: float) -> bool:
        """Save now what waits to be saved; returns whether all of it was done in time."""
        deadline = time.monotonic() + timeout_seconds
        queues = [self._incoming.wait_idle, *(lane.flush for lane in self._lanes)]
        return all(wait(max(deadline - time.monotonic(), 0.0)) for wait in queues)

    def close(self) -> None:
        """Give up fetches, save what waits, end all threads.

        Takes `close_seconds` at most, whatever a tier does.
        """
        deadline = time.monotonic() + self._close_seconds
        with self._lock:
            self._is_closed = True
            for fetch in self._fetches.values():
                fetch.is_over = True
            self._fetches.clear()
        if not self.flush(self._close_seconds / 2):
            logger.warning("KV that was not saved in %g s is lost", self._close_seconds / 2)
        self._incoming.close()
        self._encoder.join(max(deadline - time.monotonic(), 0.0))
        self._deadlines.close()
        for lane in self._lanes:
            lane.close(deadline)
