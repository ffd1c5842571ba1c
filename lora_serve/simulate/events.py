"""Virtual time: what happens next, and when. Two things of one time happen in the order of `at`."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class EventQueue:
    """now: seconds since the beginning; it never goes back. num_events: how many have happened."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._due: list[tuple[float, int, Action]] = []
        self._num_planned = 0

    def at(self, when: float, action: Action) -> None:
        """Have something happen at a time that is not past."""
        assert when >= self.now, f"{when} is past at {self.now}"
        self._num_planned += 1
        heapq.heappush(self._due, (when, self._num_planned, action))

    def run(self) -> None:
        """Let everything happen, and what comes of it."""
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            self.num_events += 1
            action()
