"""Which replica a request goes to. A policy knows what it was told, and looks into no replica."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Protocol

from lora_serve.bench.workload import TimedRequest


class Policy(Protocol):
    """One router before all replicas, which are numbered from 0."""

    def choose(self, request: TimedRequest) -> int:
        """The replica that gets the request, from now until `ended`."""

    def ended(self, replica: int, request: TimedRequest) -> None:
        """Note that the replica has answered, or refused, the request."""


class RoundRobin:
    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def choose(self, request: TimedRequest) -> int:
        replica, self._next = self._next, (self._next + 1) % self._num_replicas
        return replica

    def ended(self, replica: int, request: TimedRequest) -> None:
        """Turns do not depend on it."""


class LeastLoaded:
    """The replica with the fewest requests that have not ended; of several, the longest unused.

    O(log n) a request: the heap's first entry is looked at again when it comes up.
    """

    def __init__(self, num_replicas: int) -> None:
        self._loads = [0] * num_replicas
        self._entry = list(range(num_replicas))  # the number of each replica's valid entry
        self._num_entries = num_replicas
        self._heap = [(0, number, number) for number in range(num_replicas)]

    def choose(self, request: TimedRequest) -> int:
        while True:
            _, number, replica = self._heap[0]
            if number == self._entry[replica]:
                self._changed(replica, 1)
                return replica
            heapq.heappop(self._heap)

    def ended(self, replica: int, request: TimedRequest) -> None:
        self._changed(replica, -1)

    def _changed(self, replica: int, change: int) -> None:
        self._loads[replica] += change
        self._num_entries += 1
        self._entry[replica] = self._num_entries
        heapq.heappush(self._heap, (self._loads[replica], self._num_entries, replica))


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}
