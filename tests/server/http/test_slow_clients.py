"""Clients that take or give their bytes slowly, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.http import body_shares
from tests.fakes.engine import FakeEngine
from tests.server.clients import eventually, serving

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n"
)


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("sent", [b"", b'{"prompt": '])
async def test_a_body_that_does_not_come_is_not_waited_for(engine: FakeEngine, sent: bytes) -> None:
    async with serving(engine, ServerConfig(request_body_timeout=0.2)) as url:
        reader, writer = await connect(url)
        writer.write(HEAD + sent)
        answer = await asyncio.wait_for(reader.read(), 5)  # to the end: the connection is closed
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"--request-body-timeout" in answer
        writer.close()
    assert not engine.seen


async def test_a_body_that_trickles_in_has_the_same_time_as_any(engine: FakeEngine) -> None:
    async with serving(engine, ServerConfig(request_body_timeout=0.3)) as url:
        reader, writer = await connect(url)
        writer.write(HEAD)
        started = time.monotonic()
        # one line: the last byte that is sent, to a closed connection, may cost the others
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.05)
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - started < 3
        writer.close()


async def test_zero_waits_for_any_body(engine: FakeEngine) -> None:
    async with serving(engine, ServerConfig(request_body_timeout=0)) as url:
        reader, writer = await connect(url)
        writer.write(HEAD)
        await asyncio.sleep(0.2)
        writer.write(b'{"prompt": "hi", "max_tokens": 1}'.ljust(100))
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_an_answer_of_which_nothing_is_taken_is_given_up_with_its_connection(
    engine: FakeEngine,
) -> None:
    large = {"prompt": "x" * 250, "max_tokens": 250, "n": 32, "logprobs": 20, "stream": True}
    body = json.dumps(large).encode()
    async with serving(engine, ServerConfig(response_read_timeout=0.5)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as deaf:
            head = HEAD.replace(b"Length: 100", b"Length: %d" % len(body))
            deaf.sendall(head + body)
            await eventually(lambda: engine.growing)
            await eventually(lambda: engine.ended_early, 30)
    assert not engine.growing


@pytest.mark.parametrize("trickles", [False, True])
async def test_stalled_bodies_keep_no_other_out(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, *, trickles: bool
) -> None:
    monkeypatch.setattr(body_shares, "GRACE_SECONDS", 0.2)
    room, size = 2 * 2**20, 2**20
    head = HEAD.replace(b"Length: 100", b"Length: %d" % size)
    async with serving(engine, ServerConfig(max_total_body_bytes=room)) as url:
        stalled = [await connect(url) for _ in range(6)]
        for _, writer in stalled:
            writer.write(head + b'{"user": "' + b"x" * (size // 3))
            await writer.drain()
        await asyncio.sleep(0.3)
        for _ in range(4):
            if trickles:
                for reader, writer in stalled:
                    if not reader.at_eof() and not writer.is_closing():
                        writer.write(b"x" * 100)
            reader, writer = await connect(url)
            content = b'{"prompt": "hi", "max_tokens": 1}'.ljust(size)
            writer.write(head + content)
            status = await asyncio.wait_for(reader.readline(), 5)
            assert status.startswith(b"HTTP/1.1 200 "), status
            writer.close()
        assert engine.seen
        if not trickles:  # what is sent to a closed connection may cost its answer
            told = {asyncio.ensure_future(each.readline()) for each, _ in stalled}
            done, others = await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED, timeout=60)
            for each in others:
                each.cancel()
            assert {each.result()[:13] for each in done} == {b"HTTP/1.1 408 "}
        for _, writer in stalled:
            writer.close()


async def test_declared_bytes_that_have_not_come_take_no_room(engine: FakeEngine) -> None:
    size = 2**20
    head = HEAD.replace(b"Length: 100", b"Length: %d" % size)
    async with serving(engine, ServerConfig(max_total_body_bytes=4 * size)) as url:
        declared = [await connect(url) for _ in range(16)]
        for _, writer in declared:
            writer.write(head + b" " * 70_000)
            await writer.drain()
        await asyncio.sleep(0.1)
        reader, writer = await connect(url)
        writer.write(head + b'{"prompt": "hi", "max_tokens": 1}'.ljust(size - 100_000))
        await asyncio.sleep(0.05)
        writer.write(b" " * 100_000)
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200 ")
        for _, each in (*declared, (reader, writer)):
            each.close()
