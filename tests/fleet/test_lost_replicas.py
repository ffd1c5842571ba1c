from __future__ import annotations

import asyncio

from lora_serve.catalog.records import Member, Report, Standing
from lora_serve.catalog.rollout import LEASE_SECONDS
from lora_serve.errors import CatalogUnavailableError
from lora_serve.fleet.lost_replicas import lost_ones_forgotten
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
                ("dead", LEASE_SECONDS + 1),
                ("slow", LEASE_SECONDS + 1),
                ("well", 0.0),
            )
        }
        self.num_looks = 0

    async def standings(self) -> list[Standing]:
        self.num_looks += 1
        if self.num_looks == 1:
            raise CatalogUnavailableError("no store")
        return [*self.there.values()]

    async def forget(self, replica_id: str) -> None:
        del self.there[replica_id]


async def test_only_silent_replicas_that_have_ended_are_forgotten() -> None:
    names = Names()
    asked: list[str] = []

    def is_gone(name: str) -> bool:
        asked.append(name)
        return name != "slow"

    async with lost_ones_forgotten(names, is_gone, 0.01):  # type: ignore[arg-type]
        await eventually(lambda: names.num_looks > 3, 60)
    assert {*names.there} == {"own", "slow", "well"}
    assert {*asked} == {"dead", "slow"}
    num_looks = names.num_looks
    await asyncio.sleep(0.05)
    assert names.num_looks == num_looks, "it has ended"
