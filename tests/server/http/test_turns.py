from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from lora_serve.server.http.turns import ThreadByTurns


class Work:
    """Calls that note their names, of which the first waits until it is let go."""

    def __init__(self) -> None:
        self.thread = ThreadByTurns("worker")
        self.done: list[str] = []
        self._may_go = threading.Event()

    def start(self, *names: str) -> list[asyncio.Task[None]]:
        """One call for each name; its first letter is the share's."""
        return [
            asyncio.create_task(self.thread.run(name[0], partial(self._call, name)))
            for name in names
        ]

    def let_go(self) -> None:
        self._may_go.set()

    def _call(self, name: str) -> None:
        self._may_go.wait()
        self.done.append(name)
        if name.endswith("!"):
            raise ValueError(name)


async def test_shares_take_turns_and_none_waits_for_all_calls_of_another() -> None:
    work = Work()
    tasks = work.start("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    await asyncio.sleep(0)
    work.let_go()
    await asyncio.gather(*tasks)
    assert work.done == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_a_call_that_fails_or_is_given_up_leaves_the_thread_to_the_next() -> None:
    work = Work()
    fails, waits, goes_on = work.start("a1!", "a2", "b1")
    await asyncio.sleep(0)
    waits.cancel()
    work.let_go()
    with pytest.raises(ValueError, match="a1!"):
        await fails
    await goes_on
    assert work.done == ["a1!", "b1"]
    await asyncio.gather(*work.start("a3"))


async def test_a_call_whose_caller_left_keeps_its_turn_until_it_ends() -> None:
    work = Work()
    left, *others = work.start("a1", "a2", "a3", "b1")
    await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.sleep(0.01)
    others += work.start("c1")
    work.let_go()
    await asyncio.gather(*others)
    assert work.done == ["a1", "a2", "b1", "c1", "a3"]


async def test_a_turn_that_comes_as_its_call_is_given_up_is_passed_on() -> None:
    work = Work()
    first, given_up, last = work.start("a1", "a2", "a3")
    first.add_done_callback(lambda _: given_up.cancel())
    await asyncio.sleep(0)
    work.let_go()
    await asyncio.gather(first, last)
    await asyncio.gather(given_up, return_exceptions=True)
    await asyncio.gather(*work.start("b1"))
    assert work.done[-1] == "b1"
