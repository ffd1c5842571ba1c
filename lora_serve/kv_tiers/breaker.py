"""Keeps a tier that fails from costing every request its deadline.

closed ── `threshold` failures in a row ──▶ open ── back-off over ──▶ half-open: one call may try
  ▲                                          ▲                            │
  └────────────── it succeeded ──────────────┼────── it failed: twice the back-off
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"


class Breaker:
    """Thread-safe. A caller for which `allow` was True must report success or failure."""

    def __init__(
        self,
        *,
        threshold: int = 3,
        first_seconds: float = 0.5,
        longest_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0  # in a row
        self._backoff_seconds = first_seconds
        self._retry_at: float | None = None  # None while closed
        self._is_trying = False
        self.num_trips = 0

    @property
    def state(self) -> str:
        with self._lock:
            if self._retry_at is None:
                return CLOSED
            return HALF_OPEN if self._is_trying or self._may_try() else OPEN

    def allow(self) -> bool:
        """Whether the tier may be called now. While half-open, one caller gets True."""
        with self._lock:
            if self._retry_at is None:
                return True
            if self._is_trying or not self._may_try():
                return False
            self._is_trying = True
            return True

    def would_allow(self) -> bool:
        """What `allow` would say, without taking the try."""
        with self._lock:
            return self._retry_at is None or (not self._is_trying and self._may_try())

    def success(self) -> None:
        with self._lock:
            self._num_failures = 0
            self._backoff_seconds = self._first_seconds
            self._retry_at = None
            self._is_trying = False

    def failure(self) -> bool:
        """Count a failure; True if it opened the breaker."""
        with self._lock:
            self._num_failures += 1
            was_closed = self._retry_at is None
            if was_closed and self._num_failures < self._threshold:
                return False
            if not was_closed and not self._is_trying:
                return False  # the end of a call from before it opened
            self._retry_at = self._clock() + self._backoff_seconds
            self._backoff_seconds = min(2 * self._backoff_seconds, self._longest_seconds)
            self._is_trying = False
            self.num_trips += was_closed
            return was_closed

    def _may_try(self) -> bool:
        return self._retry_at is not None and self._clock() >= self._retry_at
