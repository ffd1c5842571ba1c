"""The requests that run: those that have blocks, oldest first."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator

from lora_serve.scheduler.request import Request


class RunningRequests:
    """Requests in the order of their sort keys, and how many of each share there are.

    in_order: all of them, which steps walk through; `add` and `remove` alone change it.
    """

    def __init__(self) -> None:
        self.in_order: list[Request] = []
        self._num_of_share: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.in_order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.in_order)

    def add(self, request: Request) -> None:
        insort(self.in_order, request, key=lambda r: r.sort_key)
        self._num_of_share[request.share] += 1

    def remove(self, request: Request) -> None:
        self.in_order.remove(request)
        self._num_of_share[request.share] -= 1
        if not self._num_of_share[request.share]:
            del self._num_of_share[request.share]

    def unfairly_placed(
        self, waiting: Request, goes_before: Callable[[Request, Request], bool]
    ) -> Request | None:
        """The request that gives way to `waiting`, whose share has none of the places.

        It is the youngest of its share that may, and not the oldest. The share has more places than
        any other of which `waiting` goes before such a request. None if there is no such request.
        """
        if waiting.share in self._num_of_share:
            return None
        oldest = {request.share: request for request in reversed(self.in_order)}
        youngest = {
            request.share: request
            for request in self.in_order
            if request.may_give_way and request is not oldest[request.share]
        }
        victims = (request for request in youngest.values() if goes_before(waiting, request))
        return max(victims, key=lambda r: self._num_of_share[r.share], default=None)

    def check_invariants(self) -> None:
        """Assert what must hold between steps."""
        by_key = sorted(self.in_order, key=lambda r: r.sort_key)
        assert self.in_order == by_key, "running order"
        places = Counter(request.share for request in self.in_order)
        assert self._num_of_share == places, "places of shares"
