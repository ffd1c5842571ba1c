"""Gathers what waits to be saved by namespace, so that many small saves become few large writes.

Bounded by bytes: what does not fit is refused, and the caller goes on. Knows no tier.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from lora_serve.kv_tiers.base import TierNamespace

T = TypeVar("T")
Task: TypeAlias = Callable[[], None]


@dataclass(slots=True, eq=False)
class Batch(Generic[T]):
    """Items of one namespace, in the order in which they were put.

    is_urgent: it waits for no more of them.
    """

    namespace: TierNamespace
    since: float
    is_urgent: bool = False
    items: list[T] = field(default_factory=list)
    num_bytes: int = 0


class SaveQueue(Generic[T]):
    """Any number of threads put; one takes, and calls `done` after each."""

    def __init__(self, capacity_bytes: int, batch_bytes: int, linger_seconds: float) -> None:
        """A batch is given out when it has `batch_bytes`, or its oldest item has lingered."""
        self._capacity_bytes = capacity_bytes
        self._batch_bytes = batch_bytes
        self._linger_seconds = linger_seconds
        self._changed = threading.Condition()
        self._batches: dict[bytes, Batch[T]] = {}  # by root, the oldest first
        self._tasks: deque[Task] = deque()
        self._num_bytes = 0  # queued or being saved
        self._taken_bytes = 0
        self._is_busy = False
        self._is_draining = False
        self._is_closed = False

    def put(
        self,
        namespace: TierNamespace,
        items: Sequence[T],
        num_bytes: int,
        *,
        is_urgent: bool = False,
    ) -> bool:
        """Take items; returns False, and takes none, if there is no room."""
        with self._changed:
            if self._is_closed or self._num_bytes + num_bytes > self._capacity_bytes:
                return False
            batch = self._batches.get(namespace.root)
            if batch is None:
                batch = self._batches[namespace.root] = Batch(namespace, time.monotonic())
            batch.items += items
            batch.is_urgent |= is_urgent
            batch.num_bytes += num_bytes
            self._num_bytes += num_bytes
            self._changed.notify_all()
            return True

    def put_task(self, task: Task, discard: Callable[[TierNamespace], bool]) -> None:
        """Run `task` after what is being saved now; first discard what it would undo anyway."""
        with self._changed:
            for root, batch in list(self._batches.items()):
                if discard(batch.namespace):
                    self._num_bytes -= self._batches.pop(root).num_bytes
            self._tasks.append(task)
            self._changed.notify_all()

    def take(self, timeout_seconds: float) -> Task | Batch[T] | None:
        """The next task, or a batch that is ready; None after the time, or when closed."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self._is_closed:
                if self._tasks:
                    self._is_busy = True
                    return self._tasks.popleft()
                now = time.monotonic()
                batch = self._ready(now)
                if batch is not None:
                    del self._batches[batch.namespace.root]
                    self._taken_bytes = batch.num_bytes
                    self._is_busy = True
                    return batch
                if now >= deadline:
                    return None
                self._changed.wait(min(deadline, self._due(deadline)) - now)
            return None

    def done(self) -> None:
        """Note that what was taken last is saved, or lost."""
        with self._changed:
            self._num_bytes -= self._taken_bytes
            self._taken_bytes = 0
            self._is_busy = False
            self._changed.notify_all()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Give out everything without lingering; whether all was done in time."""
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()
            is_idle = self._changed.wait_for(self._is_idle, timeout_seconds)
            self._is_draining = False
            return is_idle

    def close(self) -> None:
        """Refuse and forget everything from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _is_idle(self) -> bool:
        return self._is_closed or not (self._batches or self._tasks or self._is_busy)

    def _ready(self, now: float) -> Batch[T] | None:
        hurry = self._is_draining or 2 * self._num_bytes > self._capacity_bytes
        for batch in self._batches.values():
            is_full = batch.num_bytes >= self._batch_bytes
            if hurry or is_full or batch.is_urgent or now - batch.since >= self._linger_seconds:
                return batch
        return None

    def _due(self, default: float) -> float:
        """When the oldest batch will have lingered long enough."""
        oldest = next(iter(self._batches.values()), None)
        return default if oldest is None else oldest.since + self._linger_seconds
