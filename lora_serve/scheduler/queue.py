"""Who is next: waiting requests by adapter, and by share where shares are fair. O(log n).

A request's precedence is (priority, tokens served to its share, order of arrival), the smallest
first; without fair shares the one in the middle is the same for all. With them, a request that was
preempted for want of blocks goes before all others of its priority.

A step holds at most `max_loras` adapters. Requests of an adapter that has a LoRA slot may overtake
earlier ones of an adapter that has none, but only OVERTAKE_LIMIT times: then adapters'
requests wait until that one got a LoRA slot, so a hot set never starves it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.scheduler.request import Request, RequestStatus, SortKey
from lora_serve.scheduler.shares import FairShares

OVERTAKE_LIMIT = 64
RESUMED = -1.0  # stands before every count of served tokens

Precedence = tuple[int, float, int]


@dataclass(slots=True)
class LoRASlot:
    """One adapter's place among those that a step may hold.

    num_running: its running requests. is_loading: its weights are on their way. is_given_back: so
    long that another adapter may have the place.
    """

    num_running: int = 0
    is_loading: bool = False
    is_given_back: bool = False


Slots = dict[AdapterRef, LoRASlot]


class Headed(Protocol):
    """What stands in line as its first request does."""

    def head(self) -> Request | None: ...

    def __hash__(self) -> int: ...


Item = TypeVar("Item", bound=Headed)


class _HeadHeap(Generic[Item]):
    """Items by the precedence of their heads, which may have grown since an item was put in.

    Each item has one valid entry; it is looked at again when it comes up. An item whose head got a
    smaller one has to be put in again.
    """

    def __init__(self, precedence: Callable[[Request], Precedence]) -> None:
        self._precedence = precedence
        self._entries: list[tuple[Precedence, int, Item]] = []
        self._valid: dict[Item, int] = {}  # the number of each item's valid entry
        self._count = 0  # breaks ties before items would be compared

    def put(self, item: Item, head: Request) -> None:
        """Enter an item, or enter it anew, under its present head."""
        self._count += 1
        self._valid[item] = self._count
        heapq.heappush(self._entries, (self._precedence(head), self._count, item))

    def discard(self, item: Item) -> None:
        self._valid.pop(item, None)

    def head(self) -> Request | None:
        """The head that precedes all others. Items without a head are dropped."""
        while self._entries:
            precedence, number, item = self._entries[0]
            if self._valid.get(item) == number:
                head = item.head()
                if head is not None and self._precedence(head) == precedence:
                    return head
                heapq.heappop(self._entries)
                self.discard(item)
                if head is not None:
                    self.put(item, head)
            else:
                heapq.heappop(self._entries)
        return None


@dataclass(slots=True, eq=False)
class _Line:
    """Waiting requests of one adapter and one share, oldest first.

    Those that left are swept out when they are many.
    """

    heap: list[tuple[SortKey, Request]] = field(default_factory=list)
    num_gone: int = 0

    def head(self) -> Request | None:
        while self.heap and self.heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self.heap)
            self.num_gone -= 1
        return self.heap[0][1] if self.heap else None

    def push(self, request: Request) -> None:
        heapq.heappush(self.heap, (request.sort_key, request))

    def note_gone(self) -> None:
        self.num_gone += 1
        if 2 * self.num_gone > len(self.heap):
            self.heap = [entry for entry in self.heap if entry[1].status is RequestStatus.WAITING]
            heapq.heapify(self.heap)
            self.num_gone = 0


class _Group:
    """The waiting requests of one adapter: a line for each share."""

    def __init__(
        self, adapter: AdapterRef | NoAdapter, precedence: Callable[[Request], Precedence]
    ) -> None:
        self.adapter = adapter
        self._lines: dict[str, _Line] = {}
        self._heads: _HeadHeap[_Line] = _HeadHeap(precedence)

    def head(self) -> Request | None:
        return self._heads.head()

    def push(self, request: Request) -> None:
        line = self._lines.setdefault(request.share, _Line())
        line.push(request)
        if line.head() is request:
            self._heads.put(line, request)

    def pop_head(self) -> Request:
        head = self.head()
        assert head is not None, "no request waits in this group"
        line = self._lines[head.share]
        heapq.heappop(line.heap)
        self._drop_if_empty(head.share, line)
        return head

    def note_gone(self, request: Request) -> None:
        line = self._lines.get(request.share)
        if line is not None:
            line.note_gone()
            self._drop_if_empty(request.share, line)

    def waiting(self) -> list[Request]:
        return [
            request
            for line in self._lines.values()
            for _, request in line.heap
            if request.status is RequestStatus.WAITING
        ]

    def _drop_if_empty(self, share: str, line: _Line) -> None:
        if line.head() is None:
            self._heads.discard(line)
            del self._lines[share]


class WaitingQueue:
    """Waiting requests in the order in which they may be admitted.

    Requests of an adapter whose weights are on their way are not offered. slots: read here, and
    written by `LoRASlots`. shares: None for no shares.
    """

    def __init__(
        self, slots: Mapping[AdapterRef, LoRASlot], shares: FairShares | None = None
    ) -> None:
        self._slots = slots
        self._shares = shares
        self._base = _Group(BASE_MODEL, self._precedence)
        self._groups: dict[AdapterRef, _Group] = {}
        self._with_slot: _HeadHeap[_Group] = _HeadHeap(self._precedence)
        self._without_slot: _HeadHeap[_Group] = _HeadHeap(self._precedence)

    @property
    def adapters(self) -> list[AdapterRef]:
        """The adapters that requests wait for."""
        return list(self._groups)

    def push(self, request: Request) -> None:
        """Queue a WAITING request; one that was here before goes back to its old place."""
        if self._shares is not None:
            self._shares.wait(request.share)
        self._enqueue(request)

    def pop(self, request: Request) -> None:
        """Remove the request that `peek` returned."""
        group = self._group(request.namespace.adapter)
        assert group is not None, f"{request.request_id} is in no queue"
        head = group.pop_head()
        assert head is request, f"{request.request_id} is not at the head of its queue"
        self._drop_if_empty(group)
        self._leave_share(request)

    def admit(self, request: Request) -> None:
        """Remove the request that `peek` returned, because it is to run.

        Counts the overtaking, if it passes one before it that waits for a LoRA slot.
        """
        without_slot = self._without_slot.head()
        is_of_base = request.namespace.adapter is BASE_MODEL
        if without_slot is not None and not is_of_base and self._precedes(without_slot, request):
            without_slot.num_overtaken += 1
        if self._shares is not None and not self._resumes(request):
            self._shares.take_turn(request.share)
        self.pop(request)

    def note_gone(self, request: Request) -> None:
        """A queued request is no longer WAITING: it was aborted."""
        self._leave_share(request)
        group = self._group(request.namespace.adapter)
        if group is not None:
            group.note_gone(request)
            self._drop_if_empty(group)

    def charge(self, request: Request, num_tokens: int) -> None:
        """So many tokens are computed for a request, at its share's cost."""
        if self._shares is not None:
            self._shares.charge(request.share, num_tokens)

    def charge_answer(self, request: Request, num_new: int) -> None:
        """Charge the blocks of its answer that a request's new tokens filled."""
        size, num_tokens = request.block_size, request.num_output_tokens
        self.charge(request, num_tokens // size * size - (num_tokens - num_new) // size * size)

    def slot_changed(self, adapter: AdapterRef) -> None:
        """The adapter got or left a LoRA slot, or its weights are on their way, or are there."""
        group = self._groups.get(adapter)
        if group is not None:
            self._place(group)

    def has_waiting(self, adapter: AdapterRef) -> bool:
        group = self._groups.get(adapter)
        return group is not None and group.head() is not None

    def peek(self, slot_is_free: bool) -> Request | None:
        """The request to admit next, or None. It stays queued until `pop`."""
        base, with_slot = self._base.head(), self._with_slot.head()
        without_slot = self._without_slot.head()
        if base is None and with_slot is None and without_slot is None:
            return None
        if without_slot is not None and not slot_is_free:
            if with_slot is not None and self._precedes(without_slot, with_slot):
                with_slot = None if without_slot.num_overtaken >= OVERTAKE_LIMIT else with_slot
            without_slot = None
        candidates = [head for head in (base, with_slot, without_slot) if head is not None]
        return min(candidates, key=self._precedence, default=None)

    def goes_before(self, waiting: Request, running: Request) -> bool:
        """Whether a running request of another share gives way by its rank, if it must at all.

        It does if both are of one priority and of equal counts.
        """
        assert self._shares is not None, "no share has places of its own"
        rank = running.sort_key[0], self._shares.served(running.share)
        return self._precedence(waiting)[:2] <= rank

    def take_group(self, adapter: AdapterRef) -> list[Request]:
        """Remove and return all that wait for this adapter (it can no longer be served)."""
        group = self._groups.pop(adapter, None)
        if group is None:
            return []
        self._with_slot.discard(group)
        self._without_slot.discard(group)
        return group.waiting()

    def _precedence(self, request: Request) -> Precedence:
        priority, arrival = request.sort_key
        if self._shares is None:
            return priority, 0.0, arrival
        if self._resumes(request):
            return priority, RESUMED, arrival
        return priority, self._shares.served(request.share), arrival

    def _resumes(self, request: Request) -> bool:
        """Whether it goes first, because it was preempted for want of blocks."""
        return request.num_preemptions > 0 and not request.gave_way

    def _precedes(self, one: Request, other: Request) -> bool:
        return self._precedence(one) < self._precedence(other)

    def _leave_share(self, request: Request) -> None:
        if self._shares is not None:
            self._shares.stop_waiting(request.share)

    def _group(self, adapter: AdapterRef | NoAdapter) -> _Group | None:
        return self._base if adapter is BASE_MODEL else self._groups.get(adapter)

    def _enqueue(self, request: Request) -> None:
        adapter = request.namespace.adapter
        group = self._group(adapter)
        if group is None:
            assert adapter is not BASE_MODEL, "the base model's group is always there"
            group = self._groups[adapter] = _Group(adapter, self._precedence)
        group.push(request)
        if group.head() is request:
            self._place(group)

    def _place(self, group: _Group) -> None:
        """Put a group where its adapter's LoRA slot says."""
        adapter, head = group.adapter, group.head()
        if adapter is BASE_MODEL:
            return
        self._with_slot.discard(group)
        self._without_slot.discard(group)
        slot = self._slots.get(adapter)
        if head is None or (slot is not None and slot.is_loading):
            return
        (self._without_slot if slot is None else self._with_slot).put(group, head)

    def _drop_if_empty(self, group: _Group) -> None:
        if group.adapter is not BASE_MODEL and group.head() is None:
            self._with_slot.discard(group)
            self._without_slot.discard(group)
            del self._groups[group.adapter]
