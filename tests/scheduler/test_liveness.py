"""Every state that a small scheduler can reach, and from each of them the way to its end.

All reachable states of `small_world` are visited breadth first. From each, with nobody new and with
loads that end, every request must finish in a bounded number of steps: so there is no state in
which a request waits for ever. Worlds count as one state if `world_states` says that nothing tells
them apart that decides what can happen.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Mapping, Sequence

import pytest

from lora_serve.identity import AdapterRef, BlockHash
from lora_serve.kv.writers import PendingWrites
from lora_serve.scheduler.in_flight import Share, StepsInFlight
from lora_serve.scheduler.queue import WaitingQueue
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.seats import AdapterSeats
from tests.scheduler.small_world import Asked, World, frozen, thawed
from tests.scheduler.world_states import essence, everything

logger = logging.getLogger(__name__)

MOST_STEPS = 40  # from any state to the end of all requests in it

RED, BLUE = AdapterRef("red", b"r" * 32), AdapterRef("blue", b"b" * 32)


def explore(first: World, most_states: int = 100_000) -> int:
    """Visit every reachable state; the number of them. Fails where somebody waits for ever."""
    ends: dict[Hashable, int] = {}
    came_by: dict[Hashable, tuple[Hashable, str]] = {essence(first): ((), "")}
    worlds = deque([(essence(first), frozen(first))])
    while worlds:
        state, world = worlds.popleft()
        steps_to_the_end(state, world, ends, came_by)
        for name, happening in thawed(world).happenings():
            changed = thawed(world)
            happening(changed)
            reached = essence(changed)
            if reached not in came_by:
                assert len(came_by) < most_states, "too many states; make the world smaller"
                came_by[reached] = state, name
                worlds.append((reached, frozen(changed)))
    return len(came_by)


def steps_to_the_end(
    first: Hashable,
    frozen_world: bytes,
    ends: dict[Hashable, int],
    came_by: Mapping[Hashable, tuple[Hashable, str]],
) -> None:
    """Note in `ends` how many steps there are until nobody is left, if nobody comes or leaves."""
    state, way = first, []
    if state not in ends:
        world = thawed(frozen_world)
        while world.requests and state not in ends:
            way.append(state)
            assert len(way) <= MOST_STEPS, f"someone waits for ever after: {_path(first, came_by)}"
            world.go_on()
            state = essence(world)
    count = ends.get(state, 0)
    for passed in reversed(way):
        count += 1
        ends[passed] = count


def _path(state: Hashable, came_by: Mapping[Hashable, tuple[Hashable, str]]) -> str:
    names = []
    while (step := came_by[state])[1]:
        state = step[0]
        names.append(step[1])
    return ", ".join(reversed(names))


SHARED, OTHER = (1, 2, 3), (1, 2, 4)
WORLDS = {
    "two adapters and one seat": [Asked(RED, SHARED), Asked(RED, OTHER), Asked(BLUE, SHARED)],
    "equal prompts": [Asked(None, (1, 2, 3, 4, 5), 1)] * 3,
    "base beside adapters": [Asked(None, SHARED), Asked(RED, SHARED), Asked(BLUE, SHARED)],
    "answers that outgrow the pool": [Asked(None, (n, n, n), 4) for n in range(3)],
}


def explore_all(**mutants: type) -> None:
    for asked in WORLDS.values():
        explore(World(asked, num_blocks=3, **mutants))


@pytest.mark.parametrize(
    ("name", "fair_share"),
    [*((name, "none") for name in WORLDS), ("two adapters and one seat", "adapter")],
)
def test_nobody_waits_for_ever_in_any_reachable_state(name: str, fair_share: str) -> None:
    world = World(WORLDS[name], num_blocks=3, fair_share=fair_share)
    assert explore(world) > 20


OVERLAPPED_WORLDS = {
    "an adapter's last row in flight": [Asked(RED, SHARED, 3), Asked(BLUE, SHARED)],
    "answers that end unforeseen": [Asked(None, (n, n, n), 4, n < 2) for n in range(3)],
    "answers that outgrow the pool": [Asked(None, (n, n, n), 4) for n in range(2)],
}


@pytest.mark.parametrize("name", OVERLAPPED_WORLDS)
def test_nobody_waits_for_ever_where_steps_overlap(name: str) -> None:
    assert explore(World(OVERLAPPED_WORLDS[name], num_blocks=3, is_overlapped=True)) > 50


@pytest.mark.parametrize(
    "first",
    [
        *(World(asked, num_blocks=3) for asked in WORLDS.values()),
        World(WORLDS["two adapters and one seat"], num_blocks=3, fair_share="adapter"),
        *(World(asked, num_blocks=3, is_overlapped=True) for asked in OVERLAPPED_WORLDS.values()),
    ],
    ids=[
        *WORLDS,
        "two adapters with fair shares",
        *(f"overlapped: {n}" for n in OVERLAPPED_WORLDS),
    ],
)
def test_worlds_of_one_essence_look_alike_and_go_on_alike(first: World) -> None:
    seen, worlds = {everything(first)}, deque([frozen(first)])
    fates: dict[Hashable, Hashable] = {}
    while worlds:
        world = worlds.popleft()
        here, ways = thawed(world), set()
        for name, happening in here.happenings():
            changed = thawed(world)
            happening(changed)
            ways.add((anonymous(name, here), essence(changed)))
            if (state := everything(changed)) not in seen:
                seen.add(state)
                worlds.append(frozen(changed))
        fate = outside(here), ways
        assert fates.setdefault(essence(here), fate) == fate
    assert len(fates) < len(seen) / 2


def outside(world: World) -> Hashable:
    """What is to be seen of it without looking into the scheduler."""
    requests = [
        (world.kinds[int(request.request_id)], request.num_tokens, request.num_computed_tokens)
        for request in world.requests
    ]
    return requests, world.kv.pool.num_free, world.scheduler.num_running, len(world.in_flight)


def anonymous(name: str, world: World) -> tuple[str, int]:
    """A happening without the number that stands for a request in this world alone."""
    what, _, number = name.partition(" ")
    if what == "ask":
        return what, world.kinds[int(number)]
    if what == "abort":
        return what, [request.request_id for request in world.requests].index(number)
    return name, 0


@pytest.mark.slow
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_nobody_waits_for_ever_in_a_larger_world(is_overlapped: bool) -> None:
    adapters = [Asked(RED, SHARED), Asked(BLUE, SHARED), Asked(RED, OTHER, 3)]
    asked = [*adapters, *[Asked(None, SHARED)] * 2]
    world = World(asked, num_blocks=4, max_num_seqs=3, budget=4, is_overlapped=is_overlapped)
    num_states = explore(world)
    logger.info("%d states", num_states)
    assert num_states > 5_000


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_nobody_waits_for_ever_where_steps_of_three_requests_overlap(name: str) -> None:
    assert explore(World(WORLDS[name], num_blocks=3, is_overlapped=True)) > 80


class SleepsThroughCommits(PendingWrites[Request]):
    def written(self, writer: Request, hashes: Sequence[BlockHash]) -> list[Request]:
        super().written(writer, hashes)
        return []


class KeepsSeats(AdapterSeats):
    """An adapter's seat is not given back with its last running request."""

    def _leave(self, ref: AdapterRef) -> None:
        pass


class ForgetsToUnhold(WaitingQueue):
    def unhold(self, adapter: AdapterRef) -> None:
        pass


@pytest.mark.parametrize(
    "mutants",
    [
        {"writers_class": SleepsThroughCommits},
        {"seats_class": KeepsSeats},
        {"queue_class": ForgetsToUnhold},
    ],
    ids=lambda mutants: next(iter(mutants.values())).__name__,
)
def test_exploration_finds_a_scheduler_that(mutants: dict[str, type]) -> None:
    with pytest.raises(AssertionError):
        explore_all(**mutants)


class NeverHearsOfItsTokens(StepsInFlight):
    """A request goes on waiting for a token that was reported."""

    def land(self, step_id: int) -> Sequence[Share]:
        shares = super().land(step_id)
        for request, chunk in shares:
            request.num_awaited_tokens += chunk.sample is not None
        return shares

    def check_invariants(self, running: Sequence[Request]) -> None:
        """It is the waiting that has to show."""


def test_exploration_finds_requests_that_wait_for_a_token_they_have() -> None:
    world = World(WORLDS["answers that outgrow the pool"], num_blocks=3, is_overlapped=True)
    world.scheduler._in_flight = NeverHearsOfItsTokens()
    with pytest.raises(AssertionError, match="someone waits for ever"):
        explore(world)
