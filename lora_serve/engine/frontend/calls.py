"""Calls of operators, which wait for the engine's reply. Each has a number; its reply names it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from lora_serve.errors import LoraServeError
from lora_serve.messages import CallReply

NO_CALL = 0  # the call_id of a question whose answer no caller awaits; calls begin at 1


class EngineCalls:
    """The calls that have no reply yet."""

    def __init__(self) -> None:
        self._replies: dict[int, asyncio.Future[CallReply]] = {}
        self._num_calls = 0

    @contextmanager
    def begun(self) -> Iterator[tuple[int, asyncio.Future[CallReply]]]:
        """A new call's id, and what its reply will be in, until the block ends."""
        self._num_calls += 1
        call_id = self._num_calls
        reply = self._replies[call_id] = asyncio.get_running_loop().create_future()
        try:
            yield call_id, reply
        finally:
            del self._replies[call_id]
            if reply.done() and not reply.cancelled():
                reply.exception()  # taken note of, also where the call itself could not be sent

    def take_in(self, reply: CallReply) -> None:
        """Give a reply to its caller, who may just have given up."""
        future = self._replies.get(reply.call_id)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: LoraServeError) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
