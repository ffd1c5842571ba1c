"""Work in threads for requests whose clients may leave meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

Result = TypeVar("Result")


async def run_to_end(pool: Executor, call: Callable[[], Result]) -> Result:
    """What `call` returns, or raises, in a thread of the pool.

    Where the caller is cancelled, this ends when the thread has: what the caller holds for the
    call, such as room or a turn, is held as long as the call works. A call that has not begun is
    left out.
    """
    call_in_pool = pool.submit(call)
    ended = asyncio.wrap_future(call_in_pool)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        if not call_in_pool.cancel():
            await _wait_out(ended)
        raise


async def _wait_out(ended: asyncio.Future[Result]) -> None:
    """Wait for it, however often the waiting task is cancelled."""
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            continue
