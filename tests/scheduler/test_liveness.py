"""Every state that a small scheduler can reach without tiers, and from each the way to its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from lora_serve.identity import BASE_MODEL, AdapterRef, BlockHash
from lora_serve.kv.manager import BlockHolder, CacheHit, KVCacheManager
from lora_serve.kv.writers import PendingWrites
from lora_serve.kv_groups import KVGroup
from lora_serve.scheduler.in_flight import ScheduledPair, StepsInFlight
from lora_serve.scheduler.lora_slots import LoRASlots
from lora_serve.scheduler.pause import PauseState, SchedulerPause
from lora_serve.scheduler.queue import WaitingQueue
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler
from tests.fakes.mutant_schedulers import FAIRNESS_MUTANTS
from tests.scheduler.exploration import assert_what_is_alike_goes_on_alike, explore
from tests.scheduler.small_world import Asked, World

logger = logging.getLogger(__name__)

RED, BLUE = AdapterRef("red", b"r" * 32), AdapterRef("blue", b"b" * 32)
SHARED, OTHER = (1, 2, 3), (1, 2, 4)
SLOTS = "two adapters and one LoRA slot"
WORLDS = {
    SLOTS: [Asked(RED, SHARED), Asked(RED, OTHER), Asked(BLUE, SHARED)],
    "equal prompts": [Asked(BASE_MODEL, (1, 2, 3, 4, 5), 1)] * 3,
    "base beside adapters": [Asked(BASE_MODEL, SHARED), Asked(RED, SHARED), Asked(BLUE, SHARED)],
    "answers that outgrow the pool": [Asked(BASE_MODEL, (n, n), 4) for n in range(3)],
}


@pytest.mark.parametrize(
    ("name", "fair_share"),
    [
        *((name, "none") for name in WORLDS),
        ("two adapters and one LoRA slot", "adapter"),
        pytest.param("base beside adapters", "adapter", marks=pytest.mark.slow),
    ],
)
def test_no_request_waits_for_ever_in_any_reachable_state(name: str, fair_share: str) -> None:
    world = World(WORLDS[name], num_blocks=3, fair_share=fair_share)
    assert explore(world) > 20


OVERLAPPED_WORLDS = {
    "an adapter's last row in flight": [Asked(RED, SHARED, 3), Asked(BLUE, SHARED)],
    "answers that end unforeseen": [Asked(BASE_MODEL, (n, n), 4, n < 2) for n in range(3)],
    "answers that outgrow the pool": [Asked(BASE_MODEL, (n, n), 4) for n in range(2)],
}


@pytest.mark.parametrize("name", OVERLAPPED_WORLDS)
def test_no_request_waits_for_ever_where_steps_overlap(name: str) -> None:
    assert explore(World(OVERLAPPED_WORLDS[name], num_blocks=3, is_overlapped=True)) > 50


CROWD = [Asked(BASE_MODEL, (n, n), 3) for n in range(2)]
FAIR_WORLDS = {
    "a late share that has got more": ([*CROWD, Asked(RED, SHARED, 1)], {"red": 6.0}),
    "a late share that has got less": ([*CROWD, Asked(RED, SHARED, 1)], {"": 4.0}),
    "a crowd of an adapter": (
        [Asked(RED, (1, 1), 3), Asked(RED, (2, 2), 3), Asked(BASE_MODEL, SHARED, 1)],
        {"": 6.0},
    ),
}


def fair_world(name: str, **more: Any) -> World:
    """More requests than places, all of which one share may have."""
    asked, served = FAIR_WORLDS[name]
    return World(asked, num_blocks=9, budget=4, fair_share="adapter", served=served, **more)


@pytest.mark.parametrize("name", FAIR_WORLDS)
@pytest.mark.parametrize("is_overlapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests_give_way_only_to_shares_before_them_and_no_more_than_once(
    name: str, is_overlapped: bool
) -> None:
    assert explore(fair_world(name, is_overlapped=is_overlapped)) > 100


@pytest.mark.parametrize("mutant", FAIRNESS_MUTANTS)
def test_exploration_finds_a_scheduler_of_fair_shares_that(mutant: type[Scheduler]) -> None:
    with pytest.raises(AssertionError, match=r"gave way|given way|preempted for nothing"):
        explore(fair_world("a late share that has got more", scheduler_class=mutant))


WINDOW, FULL = KVGroup(3), KVGroup()
LONG = (1, 2, 3, 4, 5, 6, 7)
WINDOWED_WORLDS = {
    "prompts longer than the pool": lambda **more: World(
        [Asked(BASE_MODEL, LONG, 2), Asked(BASE_MODEL, (*LONG[:4], 9, 9), 3)],
        num_blocks=3,
        groups=[WINDOW],
        **more,
    ),
    "equal prompts": lambda **more: World(
        [Asked(BASE_MODEL, LONG[:5], 1)] * 3, num_blocks=4, groups=[WINDOW], **more
    ),
    "answers that outgrow the pool": lambda **more: World(
        [Asked(BASE_MODEL, (n, n), 5) for n in range(2)],
        num_blocks=6,
        groups=[FULL, WINDOW],
        **more,
    ),
    "a window beside adapters": lambda **more: World(
        [Asked(RED, SHARED, 3), Asked(BLUE, SHARED)], num_blocks=5, groups=[WINDOW, FULL], **more
    ),
}


@pytest.mark.parametrize("name", WINDOWED_WORLDS)
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_no_request_waits_for_ever_where_windows_free_blocks(
    name: str, is_overlapped: bool
) -> None:
    assert explore(WINDOWED_WORLDS[name](is_overlapped=is_overlapped)) > 20


class KeepsWhatIsUnseen(KVCacheManager):
    """A window's blocks are freed with their request only, as if there were room for all."""

    def free_unseen(self, holder: BlockHolder, num_computed_tokens: int) -> None:
        pass

    def most_tokens(self, holder: BlockHolder) -> int:
        return 100

    def lookup(self, holder: BlockHolder, max_tokens: int) -> CacheHit:
        """Find nothing: what was computed before a preemption would do for the rest."""
        return super().lookup(holder, 0)

    def check_tables(self, holder: BlockHolder, num_computed: int, num_scheduled: int) -> None:
        """It is the waiting that has to show."""


def test_exploration_finds_windows_that_keep_their_blocks() -> None:
    world = WINDOWED_WORLDS["prompts longer than the pool"]()
    kv = world.kv
    world.kv = KeepsWhatIsUnseen(kv.num_blocks, kv.block_size, True, kv.needs.groups)
    world.scheduler._kv = world.kv
    with pytest.raises(AssertionError, match="a request waits for ever"):
        explore(world)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(WINDOWED_WORLDS["equal prompts"](), id="equal prompts, a window"),
        pytest.param(
            WINDOWED_WORLDS["answers that outgrow the pool"](is_overlapped=True),
            id="answers that outgrow the pool, a window, overlapped",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(
                World(asked, num_blocks=3),
                id=name,
                marks=() if name == "equal prompts" else pytest.mark.slow,
            )
            for name, asked in WORLDS.items()
        ),
        pytest.param(
            World(
                WORLDS["two adapters and one LoRA slot"][::2], num_blocks=3, fair_share="adapter"
            ),
            id="one request of each of two adapters with fair shares",
        ),
        pytest.param(
            World(WORLDS["two adapters and one LoRA slot"], num_blocks=3, fair_share="adapter"),
            id="two adapters with fair shares",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            fair_world("a late share that has got more"),
            id="a late share that has got more",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(
                World(asked, num_blocks=3, is_overlapped=True),
                id=f"overlapped: {name}",
                marks=pytest.mark.slow if name == "answers that end unforeseen" else (),
            )
            for name, asked in OVERLAPPED_WORLDS.items()
        ),
    ],
)
def test_worlds_of_one_essence_look_alike_and_go_on_alike(first: World) -> None:
    assert_what_is_alike_goes_on_alike(first)


@pytest.mark.slow
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_no_request_waits_for_ever_in_a_larger_world(is_overlapped: bool) -> None:
    adapters = [Asked(RED, SHARED), Asked(BLUE, SHARED), Asked(RED, OTHER, 3)]
    asked = [*adapters, *[Asked(BASE_MODEL, SHARED)] * 2]
    world = World(asked, num_blocks=4, max_num_seqs=3, budget=4, is_overlapped=is_overlapped)
    num_states = explore(world)
    logger.info("%d states", num_states)
    assert num_states > 5_000


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_no_request_waits_for_ever_where_steps_of_three_requests_overlap(name: str) -> None:
    assert explore(World(WORLDS[name], num_blocks=3, is_overlapped=True)) > 80


PAUSED_WORLDS = {
    "two adapters and one LoRA slot": [Asked(RED, SHARED), Asked(BLUE, OTHER)],
    "answers that outgrow the pool": [Asked(BASE_MODEL, (n, n), 4) for n in range(2)],
    "base beside an adapter": [Asked(BASE_MODEL, SHARED), Asked(RED, OTHER, 3)],
}


@pytest.mark.parametrize("name", PAUSED_WORLDS)
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_every_pause_comes_to_rest_and_loses_no_request(name: str, is_overlapped: bool) -> None:
    world = World(PAUSED_WORLDS[name], num_blocks=3, is_overlapped=is_overlapped, num_pauses=1)
    assert explore(world) > 100


def test_pauses_may_follow_each_other() -> None:
    asked = [Asked(BASE_MODEL, SHARED, 1), Asked(RED, OTHER, 1)]
    assert explore(World(asked, num_blocks=3, num_pauses=2)) > 100


def test_a_pause_comes_to_rest_where_shares_are_fair() -> None:
    asked = PAUSED_WORLDS["two adapters and one LoRA slot"]
    world = World(asked, num_blocks=3, max_num_seqs=1, fair_share="adapter", num_pauses=1)
    assert explore(world) > 100


def test_paused_worlds_of_one_essence_go_on_alike() -> None:
    asked = PAUSED_WORLDS["answers that outgrow the pool"]
    assert_what_is_alike_goes_on_alike(World(asked, num_blocks=3, num_pauses=1))


class LosesHeldRequests(SchedulerPause):
    def enter(self, state: PauseState) -> list[Request]:
        super().enter(state)
        return []


class HoldsWhatHasBegun(SchedulerPause):
    """A request that was preempted is held with those that never ran."""

    def holds(self, request: Request) -> bool:
        return self.is_draining


@pytest.mark.parametrize("mutant", [LosesHeldRequests, HoldsWhatHasBegun])
def test_exploration_finds_a_pause_that(mutant: type[SchedulerPause]) -> None:
    asked = PAUSED_WORLDS["answers that outgrow the pool"]
    world = World(asked, num_blocks=3, num_pauses=1, pause_class=mutant)
    with pytest.raises(AssertionError, match="a request waits for ever"):
        explore(world)


class SleepsThroughCommits(PendingWrites[Request]):
    def written(self, writer: Request, hashes: Sequence[BlockHash]) -> list[Request]:
        super().written(writer, hashes)
        return []


class KeepsSlots(LoRASlots):
    """An adapter's LoRA slot is not given back with its last running request."""

    def _leave(self, ref: AdapterRef) -> None:
        if self._slots[ref].is_given_back:
            super()._leave(ref)


class LosesSlotsWithWeights(LoRASlots):
    """An adapter whose weights are lost is thought to be loading for ever."""

    def load_ended(self, ref: AdapterRef) -> None:
        if self._queue.has_waiting(ref):
            super().load_ended(ref)


class KeepsSlotsOfSlowLoads(LoRASlots):
    """An adapter keeps its LoRA slot however long its weights take."""

    def give_back(self, ref: AdapterRef) -> None:
        pass


def test_exploration_finds_slots_that_a_load_that_hangs_keeps() -> None:
    with pytest.raises(AssertionError, match="waits for another's fetch or load"):
        explore(World(WORLDS[SLOTS], num_blocks=3, slots_class=KeepsSlotsOfSlowLoads))


class LosesThePreempted(WaitingQueue):
    def push(self, request: Request) -> None:
        if not request.num_preemptions:
            super().push(request)


class OverlooksLoads(WaitingQueue):
    """Requests behind an adapter are not offered again when its weights have come."""

    def slot_changed(self, adapter: AdapterRef) -> None:
        slot = self._slots.get(adapter)
        if slot is None or slot.is_loading:
            super().slot_changed(adapter)


@pytest.mark.parametrize(
    ("part", "mutant", "name"),
    [
        ("writers_class", SleepsThroughCommits, "equal prompts"),
        ("slots_class", KeepsSlots, SLOTS),
        ("slots_class", LosesSlotsWithWeights, SLOTS),
        ("queue_class", OverlooksLoads, SLOTS),
        ("queue_class", LosesThePreempted, "answers that outgrow the pool"),
    ],
)
def test_exploration_finds_a_scheduler_that(part: str, mutant: type, name: str) -> None:
    """name: of a world in which it shows."""
    with pytest.raises(AssertionError, match="a request waits for ever"):
        explore(World(WORLDS[name], num_blocks=3, **{part: mutant}))


class NeverHearsOfItsTokens(StepsInFlight):
    """A request goes on waiting for a token that was reported."""

    def finish(self, step_id: int) -> Sequence[ScheduledPair]:
        pairs = super().finish(step_id)
        for request, chunk in pairs:
            request.num_pending_tokens += bool(chunk.asked.samples)
        return pairs

    def check_invariants(self, running: Sequence[Request]) -> None:
        """It is the waiting that has to show."""


def test_exploration_finds_requests_that_wait_for_a_token_they_have() -> None:
    world = World([Asked(BASE_MODEL, SHARED, 4)], num_blocks=3, is_overlapped=True)
    world.scheduler._in_flight = NeverHearsOfItsTokens()
    with pytest.raises(AssertionError, match="a request waits for ever"):
        explore(world)
