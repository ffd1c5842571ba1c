"""Every state that a small scheduler can reach with tiers and resets, and from each its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lora_serve.identity import BASE_MODEL, EVERYTHING, AdapterRef, Everything
from lora_serve.kv.blocks import BlockPool, KVCacheBlock
from lora_serve.kv.connector import FetchesEnded
from lora_serve.kv.fetches import Fetches
from lora_serve.kv.tiered_connector import TieredConnector
from lora_serve.kv_groups import KVGroup
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.scheduler.queue import Slots, WaitingQueue
from lora_serve.scheduler.request import Request, RequestStatus
from tests.scheduler.exploration import assert_what_is_alike_goes_on_alike, explore
from tests.scheduler.small_world import Asked, World

logger = logging.getLogger(__name__)

RED, BLUE = AdapterRef("red", b"r" * 32), AdapterRef("blue", b"b" * 32)
TWO_BLOCKS, ONE_BLOCK = (1, 2, 3, 4, 5), (1, 2, 3)  # to be found, but for the last token
EQUAL = [Asked(BASE_MODEL, TWO_BLOCKS, 1)] * 2
PARTING = [Asked(BASE_MODEL, TWO_BLOCKS, 1), Asked(BASE_MODEL, (1, 2, 5, 6, 7), 1)]
STRANGERS = [Asked(BASE_MODEL, TWO_BLOCKS, 1), Asked(BASE_MODEL, (5, 6, 7), 1)]
OUTGROWING = [Asked(BASE_MODEL, (n, n), 4) for n in range(2)]
ADAPTERS = [Asked(RED, ONE_BLOCK), Asked(BLUE, ONE_BLOCK)]


def tiered(asked: list[Asked], **settings: Any) -> World:
    return World(asked, has_tiers=True, **({"num_blocks": 3} | settings))


WORLDS: dict[str, Callable[..., World]] = {
    "equal prompts share a fetch": lambda **more: tiered(EQUAL, **more),
    "prompts part in a fetch": lambda **more: tiered(PARTING, **more),
    "a failed fetch ends its requests": lambda **more: tiered(EQUAL, failure_policy="fail", **more),
    "memory for one fetched block": lambda **more: tiered(STRANGERS, max_fetched_blocks=1, **more),
    "answers that outgrow the pool": lambda **more: tiered(OUTGROWING, **more),
    "two adapters and one LoRA slot": lambda **more: tiered(ADAPTERS, **more),
    "a window beside full layers": lambda **more: tiered(
        PARTING, num_blocks=6, groups=[KVGroup(3), KVGroup()], **more
    ),
}


LARGEST = "two adapters and one LoRA slot"
NAMES = [name for name in WORLDS if name != LARGEST] + [
    pytest.param(LARGEST, marks=pytest.mark.slow)  # alone as many states as all others
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_no_request_waits_for_ever_for_a_fetch(name: str, is_overlapped: bool) -> None:
    assert explore(WORLDS[name](is_overlapped=is_overlapped)) > 50


@pytest.mark.parametrize("name", NAMES)
def test_no_request_waits_for_ever_for_what_is_reset(name: str) -> None:
    assert explore(WORLDS[name](resets=[EVERYTHING])) > 70


@pytest.mark.parametrize(
    ("asked", "has_tiers"),
    [
        (ADAPTERS, False),
        pytest.param([Asked(RED, ONE_BLOCK, 1)] * 2, True, marks=pytest.mark.slow),
        pytest.param(ADAPTERS, True, marks=pytest.mark.slow),
    ],
    ids=["two adapters", "one adapter, tiers", "two adapters, tiers"],
)
def test_no_request_waits_for_ever_where_an_adapter_is_reset(
    asked: list[Asked], has_tiers: bool
) -> None:
    assert explore(World(asked, num_blocks=3, resets=["red"], has_tiers=has_tiers)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_no_request_waits_for_ever_for_what_is_reset_under_steps_that_overlap(name: str) -> None:
    num_states = explore(WORLDS[name](resets=[EVERYTHING], is_overlapped=True))
    logger.info("%d states", num_states)
    assert num_states > 500


THREE_OF_ADAPTERS = [*ADAPTERS, Asked(RED, (1, 2, 4))]
LARGER_WORLDS = {
    "three of adapters": tiered(THREE_OF_ADAPTERS),
    "three of adapters, overlapped": tiered(THREE_OF_ADAPTERS, is_overlapped=True),
    "three of adapters, reset": tiered(THREE_OF_ADAPTERS, resets=["red", EVERYTHING]),
    "three that outgrow the pool": tiered(
        [Asked(BASE_MODEL, (n, n), 4) for n in range(3)], resets=[EVERYTHING], is_overlapped=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER_WORLDS)
def test_no_request_waits_for_ever_in_a_larger_world_with_tiers(name: str) -> None:
    num_states = explore(LARGER_WORLDS[name])
    logger.info("%d states", num_states)
    assert num_states > 5_000


@pytest.mark.parametrize(
    "first",
    [
        tiered(EQUAL),
        tiered(EQUAL, failure_policy="fail", is_overlapped=True),
        pytest.param(tiered(PARTING, resets=[EVERYTHING]), marks=pytest.mark.slow),
        pytest.param(
            tiered([Asked(RED, ONE_BLOCK, 1)] * 2, resets=["red"]), marks=pytest.mark.slow
        ),
    ],
    ids=["equal prompts", "failed fetches, overlapped", "parting prompts, reset", "adapter, reset"],
)
def test_worlds_of_one_essence_look_alike_and_go_on_alike(first: World) -> None:
    assert_what_is_alike_goes_on_alike(first)


# ── bugs that are put back ──────────────────────────────────────────────────────────────────


class SleepsThroughMisses(TieredConnector[Request]):
    """A fetch that gives nothing wakes no request."""

    def take_fetched(self) -> FetchesEnded[Request]:
        ended = super().take_fetched()
        lucky = [request for request in ended.ready if self._fetches.in_hand(request).blocks]
        return FetchesEnded(lucky, ended.failed)


class WakesTheFirst(TieredConnector[Request]):
    """A bug: of the requests that share a fetch, only one goes on."""

    def take_fetched(self) -> FetchesEnded[Request]:
        ended = super().take_fetched()
        return FetchesEnded(ended.ready[:1], ended.failed)


class ForgetsWhatFailed(TieredConnector[Request]):
    def take_fetched(self) -> FetchesEnded[Request]:
        return FetchesEnded(super().take_fetched().ready)


class WaitsForMemory(TieredConnector[Request]):
    """A request waits where there is no memory for what it would fetch, and is never woken."""

    def fetch(self, request: Request, first_block: int, last_block: int) -> bool:
        is_asked = first_block < last_block and not self._fetches.has_asked(request, first_block)
        return super().fetch(request, first_block, last_block) or is_asked


class FetchesForTheGone(TieredConnector[Request]):
    """An aborted request's fetch goes on, and what it gives is kept."""

    def forget(self, request: Request) -> None:
        if request.status is not RequestStatus.FETCHING:
            super().forget(request)


class FetchesForTheGoneThatWerePreempted(TieredConnector[Request]):
    def forget(self, request: Request) -> None:
        if not (request.num_preemptions and request.status is RequestStatus.FETCHING):
            super().forget(request)


class ResetWakesNobody(TieredConnector[Request]):
    def reset(self, lora_name: str | Everything) -> tuple[list[Request], Forgetting]:
        _, forgetting = super().reset(lora_name)
        return [], forgetting


FOR_EVER, LEAKS = "a request waits for ever", r"block \d: 1 of 0"


@pytest.mark.parametrize(
    ("name", "connector", "shows_as"),
    [
        ("equal prompts share a fetch", SleepsThroughMisses, FOR_EVER),
        ("equal prompts share a fetch", FetchesForTheGone, LEAKS),
        ("prompts part in a fetch", WakesTheFirst, FOR_EVER),
        ("a failed fetch ends its requests", ForgetsWhatFailed, FOR_EVER),
        ("memory for one fetched block", WaitsForMemory, FOR_EVER),
        ("answers that outgrow the pool", FetchesForTheGoneThatWerePreempted, LEAKS),
        ("equal prompts share a fetch", ResetWakesNobody, FOR_EVER),
    ],
)
def test_exploration_finds_a_connector_that(
    name: str, connector: type[TieredConnector[Request]], shows_as: str
) -> None:
    with pytest.raises(AssertionError, match=shows_as):
        explore(WORLDS[name](resets=[EVERYTHING], connector_class=connector))


class AsksAgain(Fetches[Request]):
    """A request that missed a block asks for it again, and misses it again."""

    def has_asked(self, who: Request, block: int) -> bool:
        return False


def test_exploration_finds_a_request_that_goes_in_circles() -> None:
    world = tiered(EQUAL)
    world.connector._fetches = AsksAgain(1, 2)
    with pytest.raises(AssertionError, match=FOR_EVER):
        explore(world)


class CountsTheParked(WaitingQueue):
    """An adapter keeps its LoRA slot while a request of it waits for a fetch."""

    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self._popped: list[Request] = []

    def pop(self, request: Request) -> None:
        super().pop(request)
        self._popped.append(request)

    def has_waiting(self, adapter: AdapterRef) -> bool:
        is_parked = any(
            request.status is RequestStatus.FETCHING and request.namespace.adapter == adapter
            for request in self._popped
        )
        return is_parked or super().has_waiting(adapter)


def test_exploration_finds_a_fetch_that_keeps_a_slot() -> None:
    with pytest.raises(AssertionError, match="a request waits for another's fetch"):
        explore(tiered(ADAPTERS, queue_class=CountsTheParked))


class FreesBlocksInUse(BlockPool):
    """A reset takes the blocks that it forgets from requests that hold them."""

    def _forget_all(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self._forget(block)
            block.ref_cnt = 0
            self._free[block.block_id] = None
            self._free.move_to_end(block.block_id, last=False)


@pytest.mark.parametrize("lora_name", [EVERYTHING, "red"])
def test_exploration_finds_a_reset_that_frees_blocks_in_use(lora_name: str | Everything) -> None:
    world = tiered(ADAPTERS, resets=[lora_name])
    world.kv.pool = FreesBlocksInUse(world.kv.num_blocks)
    with pytest.raises(AssertionError, match="block 0: 0 of 1"):
        explore(world)
