"""Who is next: waiting requests, grouped by adapter, oldest first. O(log n) an operation.

A step holds at most `max_loras` adapters. Requests of an adapter that has a seat (warm) may
overtake older ones of an adapter that has none (cold), but only OVERTAKE_LIMIT times: then
adapters' requests wait until the cold one got a seat, so a hot set never starves it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from lora_serve.identity import AdapterRef
from lora_serve.scheduler.request import Request, RequestStatus, SortKey

OVERTAKE_LIMIT = 64


@dataclass(slots=True, eq=False)
class _Group:
    """The waiting requests of one adapter. Those that left are swept out when they are many."""

    adapter: AdapterRef | None
    heap: list[tuple[SortKey, Request]] = field(default_factory=list)
    num_gone: int = 0

    def head(self) -> Request | None:
        while self.heap and self.heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self.heap)
            self.num_gone -= 1
        return self.heap[0][1] if self.heap else None

    def note_gone(self) -> None:
        self.num_gone += 1
        if 2 * self.num_gone > len(self.heap):
            self.heap = [entry for entry in self.heap if entry[1].status is RequestStatus.WAITING]
            heapq.heapify(self.heap)
            self.num_gone = 0


class _GroupHeap:
    """Groups by the age of their heads. An entry whose head has changed since is stale."""

    def __init__(self) -> None:
        self._entries: list[tuple[SortKey, int, _Group]] = []
        self._members: set[_Group] = set()
        self._count = 0  # breaks ties before groups would be compared

    def add(self, group: _Group, head: Request) -> None:
        """Enter the group under its present head."""
        self._members.add(group)
        self._count += 1
        heapq.heappush(self._entries, (head.sort_key, self._count, group))

    def discard(self, group: _Group) -> None:
        self._members.discard(group)

    def top(self) -> Request | None:
        """The oldest head of all groups."""
        while self._entries:
            key, _, group = self._entries[0]
            head = group.head() if group in self._members else None
            if head is not None and head.sort_key == key:
                return head
            heapq.heappop(self._entries)
            if head is not None:
                self.add(group, head)
        return None


class WaitingQueue:
    """Waiting requests in the order in which they may be admitted."""

    def __init__(self) -> None:
        self._groups: dict[AdapterRef | None, _Group] = {None: _Group(None)}
        self._seated: set[AdapterRef] = set()
        self._held: set[AdapterRef] = set()
        self._warm, self._cold = _GroupHeap(), _GroupHeap()

    @property
    def adapters(self) -> list[AdapterRef]:
        """Those that requests wait for."""
        return [adapter for adapter in self._groups if adapter is not None]

    def push(self, request: Request) -> None:
        """Queue a WAITING request; one that was here before goes back to its old place."""
        adapter = request.namespace.adapter
        group = self._groups.get(adapter)
        if group is None:
            group = self._groups[adapter] = _Group(adapter)
        heapq.heappush(group.heap, (request.sort_key, request))
        if group.head() is request:
            self._place(group)

    def pop(self, request: Request) -> None:
        """Remove the request that `peek` returned."""
        group = self._groups[request.namespace.adapter]
        assert group.head() is request, f"{request.request_id} is not at the head of its queue"
        heapq.heappop(group.heap)
        self._place(group)

    def note_gone(self, request: Request) -> None:
        """A queued request is no longer WAITING: it was aborted."""
        group = self._groups.get(request.namespace.adapter)
        if group is not None:
            group.note_gone()
            if group.head() is None:
                self._place(group)

    def seat(self, adapter: AdapterRef) -> None:
        """The adapter got a seat: its requests are warm."""
        self._seated.add(adapter)
        self._replace(adapter)

    def unseat(self, adapter: AdapterRef) -> None:
        self._seated.discard(adapter)
        self._replace(adapter)

    def hold(self, adapter: AdapterRef) -> None:
        """Offer none of this adapter's requests until `unhold` (its weights are on their way)."""
        self._held.add(adapter)
        self._replace(adapter)

    def unhold(self, adapter: AdapterRef) -> None:
        self._held.discard(adapter)
        self._replace(adapter)

    def has_waiting(self, adapter: AdapterRef) -> bool:
        group = self._groups.get(adapter)
        return group is not None and group.head() is not None

    def peek(self, seat_is_free: bool) -> Request | None:
        """The request to admit next, or None. It stays queued until `pop`."""
        base, warm, cold = self._groups[None].head(), self._warm.top(), self._cold.top()
        if cold is not None and not seat_is_free:
            if warm is not None and cold.sort_key < warm.sort_key:
                warm = None if cold.num_overtaken >= OVERTAKE_LIMIT else warm
            cold = None
        candidates = [head for head in (base, warm, cold) if head is not None]
        return min(candidates, key=lambda request: request.sort_key, default=None)

    def note_admitted(self, request: Request) -> None:
        """Count the overtaking, if `request` just passed an older one that waits for a seat."""
        cold = self._cold.top()
        if request.namespace.adapter and cold and cold.sort_key < request.sort_key:
            cold.num_overtaken += 1

    def take_group(self, adapter: AdapterRef) -> list[Request]:
        """Remove and return all that wait for this adapter (it can no longer be served)."""
        group = self._groups.pop(adapter, None)
        if group is None:
            return []
        self._warm.discard(group)
        self._cold.discard(group)
        return [request for _, request in group.heap if request.status is RequestStatus.WAITING]

    def _replace(self, adapter: AdapterRef) -> None:
        group = self._groups.get(adapter)
        if group is not None:
            self._place(group)

    def _place(self, group: _Group) -> None:
        """Put a group where its adapter's seat says; drop it when nobody waits in it."""
        adapter = group.adapter
        if adapter is None:
            return
        self._warm.discard(group)
        self._cold.discard(group)
        head = group.head()
        if head is None:
            del self._groups[adapter]
        elif adapter not in self._held:
            (self._warm if adapter in self._seated else self._cold).add(group, head)
