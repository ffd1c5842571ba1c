from __future__ import annotations

from collections.abc import Sequence

from lora_serve.identity import BASE_MODEL, AdapterRef, BlockHash
from lora_serve.kv.events import Medium
from lora_serve.kv.tier_copies import Copy, TierCopies
from lora_serve.kv_tiers.base import Drop
from tests.fakes.kv_blocks import a_namespace, chain

NAMESPACE = a_namespace("n", "A")
VERSION = AdapterRef("n", NAMESPACE.digest)
FIRST, SECOND = chain(NAMESPACE, "prompt", 2)
TIERS = ("ram", "disk", "redis")
ALL = Drop(NAMESPACE.model)


class World:
    """What was told, in its order: + or - before each medium and block."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Medium, BlockHash]] = []
        self.num_notified = 0
        self.copies = TierCopies(
            lambda copies: self._tell("+", copies),
            lambda copies: self._tell("-", copies),
            self._notify,
        )

    def _tell(self, sign: str, copies: Sequence[Copy]) -> None:
        self.told += [(sign, *copy) for copy in copies]

    def _notify(self) -> None:
        self.num_notified += 1

    def take(self) -> list[tuple[str, Medium, BlockHash]]:
        self.copies.take_in()
        told, self.told = self.told, []
        return told


def test_reports_wait_until_they_are_taken_in() -> None:
    world = World()
    world.copies.stored("ram", NAMESPACE, [FIRST])
    assert (world.told, world.num_notified) == ([], 1)
    assert world.take() == [("+", Medium.CPU, FIRST)]
    assert world.copies.of(VERSION) == [(Medium.CPU, FIRST)]
    assert world.copies.version_of((Medium.CPU, FIRST)) == VERSION
    assert world.copies.version_of((Medium.STORAGE, FIRST)) is None


def test_a_copy_is_gone_when_the_last_tier_of_its_medium_has_lost_it() -> None:
    world = World()
    world.copies.stored("disk", NAMESPACE, [FIRST, SECOND])
    world.copies.stored("redis", NAMESPACE, [FIRST])
    assert world.take() == [("+", Medium.STORAGE, FIRST), ("+", Medium.STORAGE, SECOND)]
    world.copies.removed("disk", [FIRST])
    assert world.take() == []
    world.copies.removed("redis", [FIRST, SECOND])  # it never had the second
    assert world.take() == [("-", Medium.STORAGE, FIRST)]
    world.copies.removed("ram", [SECOND])
    assert world.take() == []


def test_what_is_to_be_dropped_is_gone_at_once_and_so_is_what_is_still_being_saved_of_it() -> None:
    world, other = World(), a_namespace("other")
    (elsewhere,) = chain(other, "prompt", 1)
    world.copies.stored("ram", NAMESPACE, [FIRST])
    world.copies.stored("ram", other, [elsewhere])
    drop = Drop(NAMESPACE.model, "n")
    world.copies.dropping(drop, ("ram", "disk"))
    assert world.take() == [
        ("+", Medium.CPU, FIRST),
        ("+", Medium.CPU, elsewhere),
        ("-", Medium.CPU, FIRST),
    ]
    world.copies.stored("disk", NAMESPACE, [FIRST])  # saved before the drop, reported after it
    world.copies.dropped("ram", drop)
    world.copies.stored("ram", NAMESPACE, [SECOND])
    assert world.take() == [("+", Medium.CPU, SECOND)]
    world.copies.dropped("disk", drop)
    world.copies.stored("disk", NAMESPACE, [FIRST])
    assert world.take() == [("+", Medium.STORAGE, FIRST)]


def test_each_of_two_equal_drops_ends_by_a_report_of_its_own() -> None:
    world = World()
    world.copies.dropping(ALL, ("ram",))
    world.copies.dropping(ALL, ("ram",))
    world.copies.dropped("ram", ALL)
    world.copies.stored("ram", NAMESPACE, [FIRST])
    assert world.take() == []
    world.copies.dropped("ram", ALL)
    world.copies.dropped("ram", ALL)  # of nobody's
    world.copies.stored("ram", NAMESPACE, [FIRST])
    assert world.take() == [("+", Medium.CPU, FIRST)]


def test_a_version_that_is_kept_keeps_its_copies() -> None:
    world, old = World(), a_namespace("n", "old")
    base = a_namespace("")
    (of_old,), (of_base,) = chain(old, "prompt", 1), chain(base, "prompt", 1)
    for namespace, block in ((NAMESPACE, FIRST), (old, of_old), (base, of_base)):
        world.copies.stored("ram", namespace, [block])
    world.take()
    world.copies.dropping(Drop(NAMESPACE.model, "n", keep=(NAMESPACE.digest, 0)), TIERS)
    assert world.take() == [("-", Medium.CPU, of_old)]
    assert world.copies.of(BASE_MODEL) == [(Medium.CPU, of_base)]
    world.copies.clear()
    assert world.take() == []
    assert world.copies.of(BASE_MODEL) == []
