"""Schedulers with a bug of giving way to other shares put back."""

from __future__ import annotations

from lora_serve.kv.manager import CacheHit
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler


def is_of_no_better_priority(waiting: Request, running: Request) -> bool:
    return waiting.sort_key[0] <= running.sort_key[0]


class LeavesThePlaceToAll(Scheduler):
    """Its place is for any request then, be it the one that gave way, whatever the counts say."""

    def _give_way(self, budget: int) -> int:
        waiting = None if self._pause.is_on else self._queue.peek(self._slots.is_free)
        if waiting is None:
            return budget
        victim = self._running.unfairly_placed(waiting, is_of_no_better_priority)
        if victim is None:
            return budget
        if self._in_flight:
            self._scheduled = []
            return 0
        budget += sum(len(chunk.token_ids) for r, chunk in self._scheduled if r is victim)
        self._scheduled = [pair for pair in self._scheduled if pair[0] is not victim]
        victim.gave_way = True
        self._preempt(victim)
        return budget


class AsksForNoCounts(Scheduler):
    """A request gives way to a share that has got more than its own."""

    def _give_way(self, budget: int) -> int:
        queue = self._queue
        queue.goes_before = is_of_no_better_priority  # type: ignore[method-assign]
        try:
            return super()._give_way(budget)
        finally:
            del queue.goes_before


class LooksForNothingBefore(LeavesThePlaceToAll):
    """A request gives way to one whose weights or KV have yet to come."""

    def _give_way(self, budget: int) -> int:
        waiting = self._queue.peek(self._slots.is_free)
        running = self._running.in_order
        if waiting is None or not self._queue.goes_before(waiting, running[-1]):
            return budget
        return super()._give_way(budget)


class KeepsHavingGivenWay(Scheduler):
    """A request that gave way once never resumes first again."""

    def _admit(self, request: Request, hit: CacheHit, budget: int) -> int:
        gave_way = request.gave_way
        num_tokens = super()._admit(request, hit, budget)
        request.gave_way = gave_way
        return num_tokens


FAIRNESS_MUTANTS = (
    LeavesThePlaceToAll,
    AsksForNoCounts,
    LooksForNothingBefore,
    KeepsHavingGivenWay,
)
