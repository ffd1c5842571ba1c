from __future__ import annotations

import asyncio

import pytest

from lora_serve.errors import OverloadedError
from lora_serve.server.http.budget import Budget


async def hold(budget: Budget, amount: int, until: asyncio.Event, taken: list[int]) -> None:
    async with budget.share(amount):
        taken.append(amount)
        await until.wait()


async def test_shares_are_given_in_order_and_none_overtakes() -> None:
    budget, taken = Budget(10, "bytes"), []
    events = [asyncio.Event() for _ in range(4)]
    amounts = (6, 8, 1, 10)
    tasks = []
    for amount, event in zip(amounts, events, strict=True):
        tasks.append(asyncio.create_task(hold(budget, amount, event, taken)))
        await asyncio.sleep(0)
    assert taken == [6]
    expected = ([6, 8, 1], [6, 8, 1], [6, 8, 1, 10])
    for event, now_taken in zip(events, expected, strict=False):
        event.set()
        await asyncio.sleep(0.01)
        assert taken == now_taken
    events[3].set()
    await asyncio.gather(*tasks)


async def test_more_than_the_whole_is_worked_on_alone() -> None:
    budget, taken = Budget(10, "bytes"), []
    events = [asyncio.Event(), asyncio.Event()]
    tasks = [asyncio.create_task(hold(budget, 1000, event, taken)) for event in events]
    await asyncio.sleep(0.01)
    assert taken == [1000]
    for event in events:
        event.set()
    await asyncio.gather(*tasks)
    assert taken == [1000, 1000]


async def test_who_waits_too_long_is_refused_and_leaves_nothing_behind() -> None:
    budget, taken = Budget(10, "bytes of texts", wait_seconds=0.01), []
    event = asyncio.Event()
    task = asyncio.create_task(hold(budget, 10, event, taken))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="5 bytes of texts had no room for"):
        async with budget.share(5):
            pass
    event.set()
    await task
    async with budget.share(10):
        pass


async def test_who_goes_away_while_waiting_leaves_nothing_behind() -> None:
    budget, taken = Budget(10, "bytes"), []
    event = asyncio.Event()
    tasks = [asyncio.create_task(hold(budget, 10, event, taken)) for _ in range(2)]
    tasks.append(asyncio.create_task(hold(budget, 1, event, taken)))
    await asyncio.sleep(0)
    tasks[1].cancel()
    event.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert taken == [10, 1]
    async with budget.share(10):
        pass
