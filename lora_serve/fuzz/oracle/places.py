"""Sees that requests give way to other shares as seldom as docs/scheduling.md says.

It looks at a scheduler before and behind each step, and knows no more of how one is scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.scheduler.request import Request, RequestStatus
from lora_serve.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Places:
    """Who had the places before a step, and shares' counts.

    num_preemptions: how often each of them had been preempted. num_lost: how many tokens had been
    computed for it, less those that it had.
    """

    num_preemptions: dict[Request, int]
    num_lost: dict[Request, int]
    served: dict[str, float]


class PlaceWatch:
    """Checks the steps of one scheduler.

    num_given_way: requests that gave way so far.
    """

    def __init__(self) -> None:
        self.num_given_way = 0
        self._running: frozenset[str] = frozenset()  # behind the last step
        self._gave_way: frozenset[str] = frozenset()

    def gave_way(self, scheduler: Scheduler) -> frozenset[str]:
        """The requests that gave way since a place last fell free otherwise."""
        running = {request.request_id for request in scheduler._running}
        return self._gave_way if self._running <= running else frozenset()

    def look(self, scheduler: Scheduler) -> Places:
        """What is to be remembered of the moment before a step."""
        self._gave_way = self.gave_way(scheduler)
        shares, requests = scheduler._queue._shares, scheduler._requests.values()
        running = scheduler._running
        return Places(
            {request: request.num_preemptions for request in running},
            {r: r.num_computed_in_all - r.num_computed_tokens for r in running},
            {} if shares is None else {r.share: shares.served(r.share) for r in requests},
        )

    def check(self, scheduler: Scheduler, before: Places) -> None:
        """Assert what must hold of a step that was scheduled, and maybe reported, since `look`."""
        running = set(scheduler._running)
        assert not any(request.gave_way for request in running), "what runs has given way"
        preempted = [r for r, count in before.num_preemptions.items() if r.num_preemptions > count]
        for request in preempted:
            assert request not in running, f"{request.request_id} was preempted for nothing"
        gave_way = [request for request in preempted if request.gave_way]
        had_places = {*before.num_preemptions, *scheduler.admitted}  # some for one step only
        is_free = not had_places <= running.union(gave_way)
        for request in gave_way:
            self._check_that_it_was_due(scheduler, before, request)
            num_had = request.num_computed_in_all - before.num_lost[request]
            too_early = before.num_lost[request] > num_had
            assert not too_early, f"{request.request_id} gave way again, and has got no further"
            has_again = request.request_id in self._gave_way and not is_free
            assert not has_again, f"{request.request_id} gave way again, and no place fell free"
        names = frozenset(request.request_id for request in gave_way)
        self.num_given_way += len(names)
        self._gave_way = frozenset() if is_free else self._gave_way | names
        self._running = frozenset(request.request_id for request in running)

    def _check_that_it_was_due(self, scheduler: Scheduler, before: Places, gave: Request) -> None:
        """Assert that its place went to a share without one, which had no more than its own."""
        assert before.served, f"{gave.request_id} gave way, and no shares are fair"
        had = {r.share for r in before.num_preemptions if r.status is not RequestStatus.FINISHED}
        count = gave.sort_key[0], before.served[gave.share]
        assert any(
            request.share not in had and (request.sort_key[0], _count(request, before)) <= count
            for request in scheduler.admitted
        ), f"{gave.request_id} gave way to no request that was before it"


def _count(request: Request, before: Places) -> float:
    """What its share had got, or less; one that resumes goes before all."""
    return 0.0 if request.num_preemptions else before.served.get(request.share, 0.0)
