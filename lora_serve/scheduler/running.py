"""The requests that run: those that have blocks, oldest first."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator

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

    def unfairly_placed(self, waiting: Request) -> Request | None:
        """The request that gives way to `waiting`, whose share has none of the places.

        It is the youngest of the share that has most of them. One place is left to each share, so
        a request gives way only as often as shares come that have none.
        """
        if waiting.share in self._num_of_share:
            return None
        share, count = self._num_of_share.most_common(1)[0]
        victim = next(request for request in reversed(self.in_order) if request.share == share)
        return victim if count > 1 and victim.sort_key[0] >= waiting.sort_key[0] else None

    def check_invariants(self) -> None:
        """Assert what must hold between steps."""
        by_key = sorted(self.in_order, key=lambda r: r.sort_key)
        assert self.in_order == by_key, "running order"
        places = Counter(request.share for request in self.in_order)
        assert self._num_of_share == places, "places of shares"
