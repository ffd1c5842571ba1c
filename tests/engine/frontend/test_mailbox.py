from __future__ import annotations

import asyncio

import pytest

from lora_serve.engine.frontend.mailbox import Mailbox


async def test_items_come_in_their_order_whether_they_were_waited_for_or_not() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    assert await mailbox.get() == 1
    waiting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    mailbox.put(2)
    mailbox.put(3)
    assert [await waiting, await mailbox.get()] == [2, 3]


async def test_what_comes_for_a_task_that_gave_up_waits_for_the_next() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for gives_up_late in (False, True):
        waiting = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        if gives_up_late:
            mailbox.put(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    mailbox.put(2)
    assert [await mailbox.get(), await mailbox.get()] == [1, 2]
