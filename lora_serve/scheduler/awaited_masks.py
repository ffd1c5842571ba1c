"""The requests that wait for what their grammar says may come next.

They stand outside of the queue, in which a request with a grammar is only while its mask is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from lora_serve.scheduler.queue import WaitingQueue
from lora_serve.scheduler.request import Request, RequestStatus
from lora_serve.structured_outputs import MaskedDrafts


class AwaitedMasks:
    """Counts the requests that wait for a mask, and queues each when its mask comes."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self.num_waiting = 0

    def wait(self, request: Request) -> None:
        """Let a request that is not in the queue wait for its next mask."""
        self.num_waiting += 1
        request.status = RequestStatus.AWAITING_MASK

    def came(self, request: Request, bitmask: bytes, drafts: MaskedDrafts | None) -> None:
        """Give a request its next mask; if it waited for it, it goes to the queue."""
        request.next_mask, request.masked_drafts = bitmask, drafts
        if request.status is RequestStatus.AWAITING_MASK:
            self.num_waiting -= 1
            request.status = RequestStatus.WAITING
            self._queue.push(request)

    def forget(self, request: Request) -> None:
        """Stop counting a request that ends, if it is waiting."""
        self.num_waiting -= request.status is RequestStatus.AWAITING_MASK

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Assert what must hold between steps."""
        statuses = [request.status for request in requests]
        num_waiting = statuses.count(RequestStatus.AWAITING_MASK)
        assert self.num_waiting == num_waiting, "a mask is not awaited as counted"
