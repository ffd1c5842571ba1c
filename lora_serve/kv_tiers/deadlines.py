"""Calls back for each ticket when its time has come. One thread for all of them."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5  # after which a ticket is tried again whose end failed


class Deadlines:
    """`expire(ticket)` is called from the thread, also for tickets that are done.

    One that raises is called again later.
    """

    def __init__(self, expire: Callable[[int], None]) -> None:
        self._expire = expire
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int]] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-deadlines", daemon=True)
        self._thread.start()

    def add(self, deadline: float, ticket: int) -> None:
        """`deadline` is in time.monotonic()."""
        with self._changed:
            heapq.heappush(self._heap, (deadline, ticket))
            if self._heap[0] == (deadline, ticket):
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (ticket := self._next()) is not None:
            try:
                self._expire(ticket)
            except Exception:  # memory is short, or a bug of ours: a request waits for this
                logger.exception("a fetch or save could not be ended at its deadline")
                self.add(time.monotonic() + RETRY_SECONDS, ticket)

    def _next(self) -> int | None:
        """Wait for the next ticket whose time has come; None when closed."""
        with self._changed:
            while not self._is_closed:
                wait = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._heap)[1]
                self._changed.wait(wait)
            return None
