from __future__ import annotations

import asyncio

from lora_serve.catalog.records import Member, Report, Standing
from lora_serve.catalog.rollout import LEASE_SECONDS
from lora_serve.errors import CatalogUnavailableError
from lora_serve.fleet.lost_replicas import (
    QUIET_SECONDS,
    is_gone,
    lost_ones_forgotten,
    run_of,
)
from tests.server.clients import eventually


def standing(name: str, silent_seconds: float) -> Standing:
    member = Member(replica_id=name, address="", incarnation="one")
    return Standing(member=member, report=Report(), silent_seconds=silent_seconds)


class Names:
    """What `lost_ones_forgotten` needs of AdapterNames. is_cut: the first look fails."""

    is_shared = True
    replica_id = "own"

    def __init__(self) -> None:
        self.there = {
            name: standing(name, seconds)
            for name, seconds in (
                ("own", 99.0),
                ("dead", QUIET_SECONDS + 1),
                ("slow", QUIET_SECONDS + 1),
                ("well", QUIET_SECONDS - 1),
            )
        }
        self.num_looks = 0

    async def standings(self) -> list[Standing]:
        self.num_looks += 1
        if self.num_looks == 1:
            raise CatalogUnavailableError("no store")
        return [*self.there.values()]

    async def forget(self, replica_id: str, *, has_ended: bool = False) -> None:
        assert has_ended, "it is silent for less than a lease"
        del self.there[replica_id]


async def test_only_silent_replicas_that_have_ended_are_forgotten() -> None:
    names = Names()
    asked: list[str] = []

    def has_ended(name: str, silent_seconds: float) -> bool:
        assert silent_seconds == QUIET_SECONDS + 1
        asked.append(name)
        if len(asked) == 1:
            raise RuntimeError("Ray's own")
        return name != "slow"

    async with lost_ones_forgotten(names, has_ended, 0.01):  # type: ignore[arg-type]
        await eventually(lambda: names.num_looks > 3, 60)
    assert {*names.there} == {"own", "slow", "well"}
    assert {*asked} == {"dead", "slow"}
    num_looks = names.num_looks
    await asyncio.sleep(0.05)
    assert names.num_looks == num_looks, "it has ended"


def test_replicas_of_earlier_starts_at_the_same_place_have_ended_and_no_others() -> None:
    """A fleet that was killed has signed nothing off; what others run is not this one's to know."""
    here, earlier, elsewhere = run_of("one:8000"), run_of("one:8000"), run_of("two:8000")
    names = {
        f"{here}/runs": False,
        f"{here}/ended": True,
        f"{earlier}/runs": True,
        f"{elsewhere}/ended": False,
        "one:8000": False,  # a server without replicas
        "one:8000/ended": False,
        "127.0.0.1:6379/ended": False,
    }
    long = LEASE_SECONDS + 1
    told = {name: is_gone(here, lambda actor: actor == "runs", name, long) for name in names}
    assert told == names
    assert not is_gone(here, lambda actor: True, f"{earlier}/runs", LEASE_SECONDS)


def test_a_cluster_knows_the_ends_of_its_own_replicas_alone() -> None:
    cluster = "10.0.0.1:6379"
    names = {f"{cluster}/ended": True, "10.0.0.2:6379/ended": False, "ended": False}
    assert {name: is_gone(cluster, lambda actor: False, name, 99.0) for name in names} == names
