from __future__ import annotations

from lora_serve.kv.handovers import Handovers
from lora_serve.kv_tiers.base import Drop
from tests.fakes.kv_blocks import a_namespace, chain

NAMESPACE = a_namespace()
ONE, TWO, THREE = chain(NAMESPACE, "prompt", 3)


class World:
    def __init__(self) -> None:
        self.num_notified = 0
        self.handovers = Handovers(self._notify)

    def _notify(self) -> None:
        self.num_notified += 1

    def num_stored(self, request_id: str) -> int:
        handover = self.handovers.get(request_id)
        assert handover is not None
        return handover.num_stored


def test_a_prompt_is_handed_over_as_far_as_its_blocks_are_stored_without_a_gap() -> None:
    world = World()
    handover = world.handovers.begin("a", (ONE, TWO, THREE))
    world.handovers.stored("disk", NAMESPACE, [TWO])
    assert world.num_stored("a") == 0
    world.handovers.already_stored("redis", [ONE])
    assert (world.num_stored("a"), world.num_notified) == (2, 2)
    assert handover.missing == {THREE}
    world.handovers.stored("disk", NAMESPACE, [THREE, THREE])
    assert world.num_stored("a") == 3
    assert not handover.missing


def test_no_other_server_looks_into_this_ones_memory() -> None:
    world = World()
    world.handovers.begin("a", (ONE,))
    world.handovers.stored("ram", NAMESPACE, [ONE])
    assert (world.num_stored("a"), world.num_notified) == (0, 0)


def test_a_block_may_be_awaited_by_several_and_what_ends_awaits_nothing() -> None:
    world = World()
    world.handovers.stored("disk", NAMESPACE, [ONE])  # nobody waits: it is not even kept
    assert world.num_notified == 0
    for request_id in "abc":
        world.handovers.begin(request_id, (ONE, TWO))
    world.handovers.end("b")
    world.handovers.end("unknown")
    world.handovers.removed("disk", [ONE])
    world.handovers.dropped("disk", Drop(b"model"))
    world.handovers.stored("disk", NAMESPACE, [ONE])
    assert [world.num_stored(request_id) for request_id in "ac"] == [1, 1]
    assert world.handovers.get("b") is None
    world.handovers.end("a")
    world.handovers.end("c")
    assert world.handovers._awaited == {}


def test_a_request_that_begins_again_keeps_what_is_stored_and_offers_all_anew() -> None:
    world = World()
    handover = world.handovers.begin("a", (ONE, TWO))
    handover.num_offered = 2
    world.handovers.stored("disk", NAMESPACE, [ONE])
    assert world.num_stored("a") == 1
    assert world.handovers.begin("a", (ONE, TWO)) is handover
    assert (handover.num_offered, handover.missing) == (0, {TWO})
