"""Visit every state that a small world can reach, and see that no request waits for ever.

All reachable states are visited breadth first, and every way on from each is noted. A request waits
for ever if loads and fetches may end, and steps may follow each other, in an order that never leads
to a state without requests: because nothing changes any more, or because states come again. Worlds
count as one state if `world_states` says that nothing tells them apart that decides what can
happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from lora_serve.scheduler.request import RequestStatus
from tests.scheduler.small_world import Happening, World, frozen, thawed
from tests.scheduler.world_states import essence, everything


class Map:
    """States by number, in the order in which they were found, and the ways between them.

    came_by: from where each was found, and by what. ways_on: to which states it goes on by itself.
    ends: those in which no request waits.
    """

    def __init__(self, first: World) -> None:
        self.number_of: dict[Hashable, int] = {essence(first): 0}
        self.came_by: list[tuple[int, str]] = [(0, "")]
        self.ways_on: list[set[int]] = []
        self.ends: set[int] = set()
        self.worlds = deque([frozen(first)])

    def follow(self, here: int, world: bytes, happenings: Iterable[Happening]) -> set[int]:
        """The other states that these lead to."""
        numbers = set()
        for name, happening in happenings:
            changed = thawed(world)
            happening(changed)
            reached = essence(changed)
            number = self.number_of.setdefault(reached, len(self.came_by))
            if number == len(self.came_by):
                self.came_by.append((here, name))
                self.worlds.append(frozen(changed))
            numbers.add(number)
        return numbers - {here}

    def path_to(self, state: int) -> str:
        names = []
        while state:
            state, name = self.came_by[state]
            names.append(name)
        return ", ".join(reversed(names))

    def first_without_an_end(self) -> int | None:
        """The first state from which the ways on may never come to one of the ends."""
        ways_here: list[list[int]] = [[] for _ in self.ways_on]
        for state, ways in enumerate(self.ways_on):
            for following in ways:
                ways_here[following].append(state)
        num_open = [len(ways) for ways in self.ways_on]
        come_to_an_end = set(self.ends)
        newly = deque(self.ends)
        while newly:
            for state in ways_here[newly.popleft()]:
                num_open[state] -= 1
                if not num_open[state] and state not in come_to_an_end:
                    come_to_an_end.add(state)
                    newly.append(state)
        return next((s for s in range(len(self.ways_on)) if s not in come_to_an_end), None)


def explore(first: World, most_states: int = 100_000) -> int:
    """Visit every reachable state; the number of them.

    Fails where a request waits for ever, or for a fetch or a load of another's.
    """
    states, idle = Map(first), None
    for here in range(most_states):
        if not states.worlds:
            break
        frozen_world = states.worlds.popleft()
        world = thawed(frozen_world)
        by_steps = states.follow(here, frozen_world, world.steps())
        by_endings = states.follow(here, frozen_world, world.endings())
        states.follow(here, frozen_world, world.disturbances())
        states.ways_on.append(by_steps | by_endings)
        if not world.requests:
            states.ends.add(here)
        if idle is None and not by_steps and _a_request_idles(world):
            idle = here
    assert not states.worlds, "too many states; make the world smaller"
    stuck = states.first_without_an_end()
    assert stuck is None, f"a request waits for ever after: {states.path_to(stuck)}"
    assert idle is None, (
        f"a request waits for another's fetch or load after: {states.path_to(idle)}"
    )
    return len(states.came_by)


def _a_request_idles(world: World) -> bool:
    """Whether a request neither fetches nor may wait for weights, where steps change nothing.

    A load that is slow may never end: only requests of its own adapter wait for it. What a pause
    keeps waits for its end.
    """
    if world.scheduler.is_at_rest or len(world.memory.loading) > len(world.memory.slow):
        return False
    return any(
        request.status not in (RequestStatus.FETCHING, RequestStatus.HELD)
        and request.namespace.adapter not in world.memory.slow
        for request in world.requests
    )


def assert_what_is_alike_goes_on_alike(first: World) -> None:
    """Visit all that can be told apart: worlds of one essence must look and go on alike."""
    seen, worlds = {everything(first)}, deque([frozen(first)])
    fates: dict[Hashable, Hashable] = {}
    while worlds:
        world = worlds.popleft()
        here, ways = thawed(world), set()
        for name, happening in here.happenings():
            changed = thawed(world)
            happening(changed)
            ways.add((_anonymous(name, here), essence(changed)))
            if (state := everything(changed)) not in seen:
                seen.add(state)
                worlds.append(frozen(changed))
        fate = _outside(here), ways
        assert fates.setdefault(essence(here), fate) == fate
    assert len(fates) < len(seen) / 2


def _outside(world: World) -> Hashable:
    """What is to be seen of it without looking into the scheduler."""
    requests = [
        (world.asked_of(request), request.num_tokens, request.num_computed_tokens)
        for request in world.requests
    ]
    scheduler = world.scheduler
    numbers = scheduler.num_running, scheduler.num_deferred, scheduler.num_fetching
    return requests, world.kv.pool.num_free, numbers, len(world.in_flight)


def _anonymous(name: str, world: World) -> Hashable:
    """A happening without the number that stands for a request or a fetch in this world alone."""
    what, _, rest = name.partition(" ")
    if what == "ask":
        return what, world.asked[int(rest)]
    if what == "abort":
        return what, [request.request_id for request in world.requests].index(rest)
    if what == "fetch":
        return what, rest.partition(" ")[2]
    return name
