"""Every state that a small scheduler can reach, and from each of them the way to its end.

The scheduler, the KV manager, the queue, the seats and the writers are the real ones. What the
world may do at any moment: a request arrives, in any order; any request is aborted; an adapter's
weights arrive or turn out to be lost; a step runs, or, where steps overlap, the next one is
planned or the oldest one reported. All reachable states are visited breadth
first. From each, with nobody new and with loads that end, every request must finish in a bounded
number of steps: so there is no state in which a request waits for ever.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from lora_serve.config import SchedulerConfig
from lora_serve.identity import AdapterRef, BlockHash, BlockHasher, CacheNamespace
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.manager import KVCacheManager
from lora_serve.kv.writers import PendingWrites
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.in_flight import Share, StepsInFlight
from lora_serve.scheduler.queue import WaitingQueue
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.scheduler.seats import AdapterSeats
from lora_serve.step import ModelRunnerOutput, RequestStepOutput, SchedulerOutput

BLOCK_SIZE = 2
DRAWN = 9  # the token that every draw gives
MOST_STEPS = 40  # from any state to the end of all requests in it

RED, BLUE = AdapterRef("red", b"r" * 32), AdapterRef("blue", b"b" * 32)


@dataclass(frozen=True)
class Asked:
    """A request that may arrive once."""

    adapter: AdapterRef | None
    prompt: tuple[int, ...]
    max_tokens: int = 2
    ends_early: bool = False  # with its first token, which nobody foresees


class Memory:
    """Room for the weights of one adapter that nobody runs on; loads take as long as they like."""

    def __init__(self) -> None:
        self.resident: set[AdapterRef] = set()
        self.loading: list[AdapterRef] = []
        self.num_running: dict[AdapterRef, int] = {}

    def is_resident(self, ref: AdapterRef) -> bool:
        return ref in self.resident

    def request_load(self, ref: AdapterRef) -> None:
        assert ref not in self.loading, "asked for twice"
        self.loading.append(ref)

    def finish_load(self, ref: AdapterRef) -> None:
        self.loading.remove(ref)
        self.resident = {r for r in self.resident if self.num_running.get(r)} | {ref}

    def on_running(self, ref: AdapterRef) -> None:
        self.num_running[ref] = self.num_running.get(ref, 0) + 1

    def on_idle(self, ref: AdapterRef) -> None:
        self.num_running[ref] -= 1


class World:
    """A scheduler and all that can happen to it."""

    def __init__(
        self,
        asked: Sequence[Asked],
        *,
        num_blocks: int,
        max_num_seqs: int = 2,
        budget: int = 3,
        fair_share: str = "none",
        is_overlapped: bool = False,
        seats_class: type[AdapterSeats] = AdapterSeats,
        writers_class: type[PendingWrites[Request]] = PendingWrites,
        queue_class: type[WaitingQueue] = WaitingQueue,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, fair_share=fair_share
        )
        self.memory = Memory()
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
        self.scheduler = scheduler = Scheduler(config, 1, self.kv, self.memory, KVConnector())
        if queue_class is not WaitingQueue:
            scheduler._queue = queue_class()
        scheduler._seats = seats_class(1, scheduler._queue, self.memory)
        scheduler._writers = writers_class()
        self.is_overlapped = is_overlapped
        self.in_flight: deque[SchedulerOutput] = deque()
        self.left_to_ask = dict(enumerate(asked))
        self.num_arrived = 0

    @property
    def requests(self) -> list[Request]:
        return list(self.scheduler._requests.values())

    def happenings(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """Everything that can happen now; each is done to a copy of this world."""
        if not self.is_overlapped:
            yield "step", World.step
        if self.is_overlapped and len(self.in_flight) < 2:
            yield "plan", World.plan
        if self.in_flight:
            yield "report", World.report
        for number in self.left_to_ask:
            yield f"ask {number}", lambda world, number=number: world.ask(number)
        for request in self.requests:
            name = request.request_id
            yield f"abort {name}", lambda world, name=name: world.abort(name)
        for ref in self.memory.loading:
            yield f"{ref.name} is loaded", lambda world, ref=ref: world.finish_load(ref)
            yield f"{ref.name} is lost", lambda world, ref=ref: world.lose(ref)

    def ask(self, number: int) -> None:
        asked = self.left_to_ask.pop(number)
        self.num_arrived += 1
        params = SamplingParams(max_tokens=asked.max_tokens)
        self.scheduler.add(
            Request(
                request_id=f"r{number}",
                params=params,
                seed=0,
                max_tokens=asked.max_tokens,
                eos_token_ids=(DRAWN,) if asked.ends_early else (),
                namespace=CacheNamespace(b"m", asked.adapter),
                hasher=HASHER,
                block_size=BLOCK_SIZE,
                sort_key=(0, self.num_arrived),
                token_ids=list(asked.prompt),
                num_prompt_tokens=len(asked.prompt),
                arrival_time=0.0,
                share=asked.adapter.name if asked.adapter else "",
            )
        )

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def finish_load(self, ref: AdapterRef) -> None:
        self.memory.finish_load(ref)
        self.scheduler.adapter_loaded(ref)

    def lose(self, ref: AdapterRef) -> None:
        self.memory.loading.remove(ref)
        self.scheduler.adapter_failed(ref)

    def step(self) -> None:
        """As the engine does it: report what was planned, or else what was planned before."""
        num_in_flight = len(self.in_flight)
        if num_in_flight < 2:
            self.plan()
        is_first = self.is_overlapped and num_in_flight == 0
        if self.in_flight and not is_first:
            self.report()

    def plan(self) -> None:
        step = self.scheduler.schedule()
        if step.requests:
            self.in_flight.append(step)
        self.scheduler.check_invariants()

    def report(self) -> None:
        step = self.in_flight.popleft()
        outputs = tuple(
            RequestStepOutput(DRAWN if request.sample else None) for request in step.requests
        )
        self.scheduler.update_from_output(ModelRunnerOutput(step.step_id, outputs))
        self.scheduler.check_invariants()

    def go_on(self) -> None:
        """What happens when nobody comes or leaves: loads end, and a step runs."""
        for ref in list(self.memory.loading):
            self.finish_load(ref)
        self.step()

    def state(self) -> Hashable:
        """All that decides what can happen next."""
        scheduler, pool, writers = self.scheduler, self.kv.pool, self.scheduler._writers
        requests = tuple(
            (
                *(r.request_id, r.sort_key, r.status, r.num_computed_tokens, tuple(r.token_ids)),
                *(tuple(r.block_ids), r.num_committed_blocks, r.offers_blocks),
                *(r.num_preemptions, r.num_overtaken, r.step_index),
                *(r.num_planned_tokens, r.num_awaited_tokens),
            )
            for r in scheduler._requests.values()
        )
        shares = scheduler._queue._shares
        return (
            requests,
            tuple(self.left_to_ask),
            tuple(pool._free),
            tuple((block.ref_cnt, block.block_hash) for block in pool.blocks),
            tuple((h, who.request_id) for h, who in writers._writer.items()),
            tuple((who.request_id, h) for who, h in writers._awaited.items()),
            tuple(scheduler._seats._num_running.items()),
            frozenset(self.memory.resident),
            tuple(self.memory.loading),
            tuple(sorted(shares._served.items())) if shares else (),
            tuple(
                tuple((chunk.request_id, chunk.start, chunk.end) for chunk in step.requests)
                for step in self.in_flight
            ),
        )


HASHER = BlockHasher("xxh3_128")


def after(world: World, happening: Callable[[World], None]) -> World:
    memo = {id(HASHER): HASHER}
    changed = copy.deepcopy(world, memo)
    happening(changed)
    return changed


def explore(first: World, most_states: int = 100_000) -> int:
    """Visit every reachable state; the number of them. Fails where somebody waits for ever."""
    ends: dict[Hashable, int] = {}
    seen = {first.state()}
    worlds: deque[tuple[World, tuple[str, ...]]] = deque([(first, ())])
    while worlds:
        world, path = worlds.popleft()
        steps_to_the_end(world, ends, path)
        for name, happening in world.happenings():
            changed = after(world, happening)
            state = changed.state()
            if state not in seen:
                assert len(seen) < most_states, "too many states; make the world smaller"
                seen.add(state)
                worlds.append((changed, (*path, name)))
    return len(seen)


def steps_to_the_end(world: World, ends: dict[Hashable, int], path: tuple[str, ...]) -> int:
    """How many steps until nobody is left, if nobody comes or leaves by himself."""
    way = []
    while world.requests and world.state() not in ends:
        way.append(world.state())
        assert len(way) <= MOST_STEPS, f"someone waits for ever after: {', '.join(path)}"
        world = after(world, World.go_on)
    count = ends.get(world.state(), 0)
    for state in reversed(way):
        count += 1
        ends[state] = count
    return count


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
    assert explore(world) > 100


OVERLAPPED_WORLDS = {
    "an adapter's last row in flight": [Asked(RED, SHARED, 3), Asked(BLUE, SHARED)],
    "answers that end unforeseen": [Asked(None, (n, n, n), 4, n < 2) for n in range(3)],
    "answers that outgrow the pool": [Asked(None, (n, n, n), 4) for n in range(2)],
}


@pytest.mark.parametrize("name", OVERLAPPED_WORLDS)
def test_nobody_waits_for_ever_where_steps_overlap(name: str) -> None:
    assert explore(World(OVERLAPPED_WORLDS[name], num_blocks=3, is_overlapped=True)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_nobody_waits_for_ever_in_a_larger_world(is_overlapped: bool) -> None:
    asked = [Asked(RED, SHARED), Asked(BLUE, SHARED), Asked(None, SHARED), Asked(RED, OTHER, 3)]
    world = World(asked, num_blocks=4, max_num_seqs=3, budget=4, is_overlapped=is_overlapped)
    assert explore(world, 10**6) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_nobody_waits_for_ever_where_steps_of_three_requests_overlap(name: str) -> None:
    assert explore(World(WORLDS[name], num_blocks=3, is_overlapped=True), 10**6) > 100


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
