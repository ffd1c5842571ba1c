from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from lora_serve.engine.frontend.message_reader import MessageReader

Sockets = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """One that sends, and the one that its messages come to."""
    context = zmq.Context()
    receiving, sending = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiving.bind("inproc://messages")
    sending.connect("inproc://messages")
    yield sending, receiving
    context.destroy(linger=0)


async def test_messages_come_in_their_order_whenever_they_were_sent(sockets: Sockets) -> None:
    sending, receiving = sockets
    reader = MessageReader(receiving)
    for number in range(3):
        sending.send(b"%d" % number)
    reader.open()
    for number in range(3):
        assert await reader.next() == b"%d" % number
    waiting = asyncio.create_task(reader.next())
    for number in range(3, 100):  # many at one wake-up
        sending.send(b"%d" % number)
    assert await waiting == b"3"
    for number in range(4, 100):
        assert await reader.next() == b"%d" % number
    reader.close()


async def test_it_ends_behind_the_last_message_and_stays_at_its_end(sockets: Sockets) -> None:
    sending, receiving = sockets
    reader = MessageReader(receiving)
    reader.open()
    sending.send(b"last")
    reader.end()
    assert [await reader.next() for _ in range(3)] == [b"last", None, None]
    reader.close()


async def test_one_that_never_was_opened_can_be_ended_and_closed(sockets: Sockets) -> None:
    reader = MessageReader(sockets[1])
    reader.end()
    assert await reader.next() is None
    reader.close()
