"""One tier's threads, queue, breakers and counters. A tier's faults never leave as exceptions.

Loads and saves have threads and breakers of their own: a write never delays a read, and a full
disk still gives what it has.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from lora_serve.engine_stats import TierFigures
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
from lora_serve.kv_tiers.breaker import Breaker
from lora_serve.kv_tiers.counters import TierCounters
from lora_serve.kv_tiers.fetch import Fetch
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.kv_tiers.save_queue import Batch, SaveQueue

logger = logging.getLogger(__name__)

MAX_TOUCHED = 1024  # prefixes whose use a tier has yet to note; older ones are forgotten
RETRY_SECONDS = 0.5  # how often a drop that a tier could not do is tried again, at most


class TierLane:
    """`deliver(lane, fetch, loaded)` is called from a reader thread after each load."""

    def __init__(
        self,
        tier: Tier,
        saves: SaveQueue[Record],
        num_readers: int,
        deliver: Callable[[TierLane, Fetch, Loaded], None],
    ) -> None:
        self.name = tier.name
        self.takes_promoted = tier.traits.takes_promoted
        self.counters = TierCounters()
        self._tier = tier
        self._saves = saves
        self._deliver = deliver
        self._load_breaker = Breaker()
        self._save_breaker = Breaker()
        self._fetches: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._last_return = time.monotonic()  # when a load last came back
        self._lock = threading.Lock()
        self._hidden: tuple[Drop, ...] = ()  # one for each drop that is not done yet
        self._touched: deque[tuple[TierNamespace, Sequence[BlockHash]]] = deque(maxlen=MAX_TOUCHED)
        self._owed: dict[Drop, list[Forgetting]] = {}  # drops that failed; the writer's
        self._watcher: TierWatcher | None = None
        self._readers = [self._thread("load", self._read) for _ in range(num_readers)]
        self._writer = self._thread("save", self._save_all)

    def _thread(self, work: str, run: Callable[[], None]) -> threading.Thread:
        # daemon: one that hangs in a dead disk's I/O must not keep the process from ending
        thread = threading.Thread(target=run, name=f"kv-{self.name}-{work}", daemon=True)
        thread.start()
        return thread

    def watch(self, watcher: TierWatcher) -> None:
        self._watcher = watcher
        self._tier.watch(watcher)

    # ── loading ─────────────────────────────────────────────────────────────────────────────

    def obstacle(self, namespace: TierNamespace, block_hash: BlockHash) -> Cause | None:
        """Why a load is not worth trying, or None. Never waits."""
        if not self._load_breaker.would_allow():
            return Cause.BREAKER
        if any(drop.takes(namespace) for drop in self._hidden):
            return Cause.ABSENT
        if not self._tier.may_hold(namespace, block_hash):
            return Cause.ABSENT
        return None

    def load(self, fetch: Fetch) -> None:
        """Queue a load of what the fetch still wants."""
        self._fetches.put(fetch)

    def give_up(self, fetch: Fetch) -> None:
        """Note that a fetch's deadline has passed while it was queued here, or being loaded."""
        if self._last_return < fetch.queued_at:
            self._failed_load("nothing came back within a request's deadline")

    def _read(self) -> None:
        while (fetch := self._fetches.get()) is not None:
            if fetch.is_over:
                continue
            try:
                self._deliver(self, fetch, self._load(fetch))
            except Exception:  # memory is short, or a bug of ours: the deadline ends this fetch
                logger.exception(
                    "KV that was loaded from the tier %s could not be passed on", self.name
                )

    def _load(self, fetch: Fetch) -> Loaded:
        if not self._load_breaker.allow():
            return Loaded(cause=Cause.BREAKER)
        start = time.monotonic()
        try:
            loaded = self._tier.load(fetch.namespace, fetch.wanted)
        except TierError as error:
            self._failed_load(str(error))
            loaded = Loaded(cause=Cause.ERROR)
        except Exception as error:  # a bug of ours must not end the thread: it would hang requests
            logger.exception("loading from the KV tier %s failed", self.name)
            self._failed_load(repr(error))
            loaded = Loaded(cause=Cause.ERROR)
        else:
            if fetch.is_late and not loaded.records:
                self._failed_load("a load took longer than a request's deadline")
            else:
                self._load_breaker.success()
        self._last_return = time.monotonic()
        self.counters.load_took(self._last_return - start)
        if loaded.cause is not None and loaded.cause.is_refusal:
            self.counters.miss(loaded.cause)
        return loaded

    def _failed_load(self, why: str) -> None:
        if self._load_breaker.failure():
            logger.warning("KV tier %s: no loads for now: %s", self.name, why)

    # ── saving ──────────────────────────────────────────────────────────────────────────────

    def lacks(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        """Whether a block is worth offering, as far as is known without I/O."""
        return not self._tier.holds(namespace, block_hash)

    def tell_already_stored(self, hashes: Sequence[BlockHash]) -> None:
        """Tell the watcher that these need not be saved."""
        if self._watcher is not None:
            self._watcher.already_stored(self.name, hashes)

    def save(
        self, namespace: TierNamespace, records: Sequence[Record], *, is_urgent: bool = False
    ) -> None:
        """Queue records; those for which there is no room are counted and lost."""
        num_bytes = sum(record.num_bytes for record in records)
        if not self._saves.put(namespace, records, num_bytes, is_urgent=is_urgent):
            self.counters.unsaved(Cause.QUEUE_FULL, len(records))

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        """Note a use elsewhere, for the writer's next turn; it does not wake for this."""
        self._touched.append((namespace, hashes))

    def hide(self, drop: Drop) -> None:
        """Hide what `drop` takes until the call of `drop` that follows is done."""
        with self._lock:
            self._hidden = (*self._hidden, drop)

    def drop(self, drop: Drop, forgetting: Forgetting) -> None:
        """Forget, after what is being saved now: try at once, then again by turns."""
        self._saves.put_task(lambda: self._owe(drop, forgetting), drop.takes)

    def _save_all(self) -> None:
        while not self._saves.is_closed:
            taken = self._saves.take(RETRY_SECONDS)
            if isinstance(taken, Batch):
                self._save(taken)
            if taken is None or isinstance(taken, Batch):
                self._pay()
            else:
                taken()
            self._touch_all()
            if taken is not None:
                self._saves.done()

    def _touch_all(self) -> None:
        while self._touched:
            namespace, hashes = self._touched.popleft()
            if self._save_breaker.allow():
                self._trouble(partial(self._tier.touch, namespace, hashes))

    def _save(self, batch: Batch[Record]) -> None:
        if not self._save_breaker.allow():
            self.counters.unsaved(Cause.BREAKER, len(batch.items))
        elif self._trouble(lambda: self._save_batch(batch)):
            self.counters.unsaved(Cause.ERROR, len(batch.items))

    def _save_batch(self, batch: Batch[Record]) -> None:
        # requests that computed one block at once have each offered it
        records = list({record.block_hash: record for record in batch.items}.values())
        start = time.monotonic()
        num_saved = self._tier.save(batch.namespace, records)
        self.counters.save_took(time.monotonic() - start)
        self.counters.saved(num_saved, batch.namespace.block_bytes)

    def _owe(self, drop: Drop, forgetting: Forgetting) -> None:
        self._owed.setdefault(drop, []).append(forgetting)
        self._forget(drop)

    def _pay(self) -> None:
        """Do the drops that are still to be done, while the tier can."""
        for drop in list(self._owed):
            if not (self._save_breaker.allow() and self._forget(drop)):
                return

    def _forget(self, drop: Drop) -> bool:
        """Let the tier forget, and notify all that asked for it; returns whether it did."""
        trouble = self._trouble(lambda: self._tier.drop(drop))
        if trouble:
            for forgetting in self._owed[drop]:
                forgetting.failed(self.name, trouble)
            return False
        forgettings = self._owed.pop(drop)
        with self._lock:
            hidden = list(self._hidden)
            for _ in forgettings:
                hidden.remove(drop)
            self._hidden = tuple(hidden)
        for forgetting in forgettings:
            if self._watcher is not None:
                self._watcher.dropped(self.name, drop)
            forgetting.confirm(self.name)
        return True

    def _trouble(self, act: Callable[[], None]) -> str:
        """The reason why the tier could not do it; "" if it did."""
        try:
            act()
        except TierError as error:
            why = str(error)
        except Exception as error:  # a bug of ours must not end the thread
            logger.exception("the KV tier %s failed", self.name)
            why = repr(error)
        else:
            self._save_breaker.success()
            return ""
        if self._save_breaker.failure():
            logger.warning("KV tier %s: no saves for now: %s", self.name, why)
        return why

    # ── both ────────────────────────────────────────────────────────────────────────────────

    def figures(self) -> TierFigures:
        contents = self._tier.contents()
        return self.counters.figures(self.name, contents, self._load_breaker, self._save_breaker)

    def flush(self, timeout_seconds: float) -> bool:
        return self._saves.wait_idle(timeout_seconds)

    def close(self, deadline: float) -> None:
        """End the threads; one that hangs is left behind at `deadline` (time.monotonic())."""
        self._saves.close()
        for _ in self._readers:
            self._fetches.put(None)
        for thread in (*self._readers, self._writer):
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                logger.warning("the thread %s hangs, and is not waited for", thread.name)
        if self._owed:
            logger.warning("KV tier %s: %d drops were not done", self.name, len(self._owed))
        self._tier.close()
