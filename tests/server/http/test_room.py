from __future__ import annotations

import asyncio

import pytest

from lora_serve.errors import OverloadedError
from lora_serve.server.http.room import Room
from lora_serve.server.http.shares import Holding, Shares


def room_of(limit: int, wait_seconds: float = 5.0) -> Room[Holding]:
    return Room(
        Shares(Holding), limit, what="bytes of texts", work="read", wait_seconds=wait_seconds
    )


async def hold(
    room: Room[Holding], amount: int, until: asyncio.Event, taken: list[str], share: str = ""
) -> None:
    with room.hold(share) as holding:
        await room.add_in_turn(holding, amount)
        taken.append(f"{share}{amount}")
        await until.wait()


async def test_a_share_gets_its_own_in_order_and_none_overtakes() -> None:
    room, taken = room_of(10), []
    events = [asyncio.Event() for _ in range(4)]
    amounts = (6, 8, 1, 10)
    tasks = []
    for amount, event in zip(amounts, events, strict=True):
        tasks.append(asyncio.create_task(hold(room, amount, event, taken)))
        await asyncio.sleep(0)
    assert taken == ["6"]
    expected = (["6", "8", "1"], ["6", "8", "1"], ["6", "8", "1", "10"])
    for event, now_taken in zip(events, expected, strict=False):
        event.set()
        await asyncio.sleep(0.01)
        assert taken == now_taken
    events[3].set()
    await asyncio.gather(*tasks)


async def test_more_than_the_whole_is_worked_on_alone() -> None:
    room, taken = room_of(10), []
    events = [asyncio.Event(), asyncio.Event()]
    tasks = [asyncio.create_task(hold(room, 1000, event, taken)) for event in events]
    await asyncio.sleep(0.01)
    assert taken == ["1000"]
    for event in events:
        event.set()
    await asyncio.gather(*tasks)
    assert taken == ["1000", "1000"]


async def test_who_waits_too_long_is_refused_and_leaves_nothing_behind() -> None:
    room, taken = room_of(10, wait_seconds=0.01), []
    event = asyncio.Event()
    task = asyncio.create_task(hold(room, 10, event, taken))
    await asyncio.sleep(0)
    told = "5 bytes of texts had no room for 0.01 s among the 10 that are read; retry later"
    with pytest.raises(OverloadedError, match=told):
        await hold(room, 5, event, taken)
    event.set()
    await task
    await hold(room, 10, event, taken)


async def test_who_goes_away_while_waiting_leaves_nothing_behind() -> None:
    room, taken = room_of(10), []
    event = asyncio.Event()
    tasks = [asyncio.create_task(hold(room, 10, event, taken)) for _ in range(2)]
    tasks.append(asyncio.create_task(hold(room, 1, event, taken)))
    await asyncio.sleep(0)
    tasks[1].cancel()
    event.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert taken == ["10", "1"]
    await hold(room, 10, event, taken)
