"""Clients that open connections and do not say what they want, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from lora_serve.config import ServerConfig
from lora_serve.server.http import connections
from lora_serve.server.http.connections import MAX_HEAD_BYTES
from tests.fakes.engine import FakeEngine
from tests.server.clients import eventually, serving

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-"
VERSION = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
COMPLETION = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
GENERATE = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION)
)

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[..., AbstractAsyncContextManager[str]]


@pytest.fixture(params=sorted({AutoHTTPProtocol, H11Protocol}, key=repr))
def http_protocol(request: pytest.FixtureRequest) -> type[H11Protocol]:
    """Each of uvicorn's that may be installed."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def serve(engine: FakeEngine, http_protocol: type[H11Protocol]) -> Serve:
    """Over the fake engine, with these settings; gives the URL."""
    return lambda **settings: serving(engine, ServerConfig(**settings), http_protocol)


async def connect(url: str, sent: bytes = b"") -> Wire:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What comes before the server closes the connection."""
    return await asyncio.wait_for(reader.read(), 10)


async def answer_on(wire: Wire, request: bytes) -> bytes:
    """Status line, head and a JSON body."""
    reader, writer = wire
    writer.write(request)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return head + await reader.readexactly(length)


async def test_half_a_head_is_answered_when_its_time_is_over(serve: Serve) -> None:
    async with serve(request_head_timeout=0.2) as url:
        reader, writer = await connect(url, HALF)
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert "0.2 s" in error["message"]
        assert "--request-head-timeout" in error["message"]
        assert (error["type"], error["code"]) == ("RequestTimeoutError", 408)
        writer.close()


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"EHLO x\r\n\r\n"])
async def test_what_is_no_http_is_refused_in_the_shape_of_errors(serve: Serve, sent: bytes) -> None:
    async with serve() as url:
        reader, writer = await connect(url, sent)
        head, _, body = (await rest_of(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"content-type: application/json" in head
        error = json.loads(body)["error"]
        assert "no HTTP/1.1 request" in error["message"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        writer.close()


async def test_what_follows_a_request_and_is_no_http_does_not_answer_it(
    engine: FakeEngine, serve: Serve
) -> None:
    engine.gate.clear()
    async with serve() as url:
        reader, writer = await connect(url, GENERATE)
        await eventually(lambda: engine.growing)
        writer.write(b"\x00 no HTTP\r\n\r\n")
        await asyncio.sleep(0.05)
        engine.gate.set()
        answers = await rest_of(reader)
        assert not answers or answers.startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_byte_now_and_then_gains_no_time(serve: Serve) -> None:
    async with serve(request_head_timeout=0.3) as url:
        reader, writer = await connect(url, HALF)
        started = time.monotonic()
        # one line: the last byte that is sent, to a closed connection, may cost the others
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b"a")
            await asyncio.sleep(0.05)
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - started < 5
        writer.close()


async def test_a_connection_that_says_nothing_is_closed_without_a_word(serve: Serve) -> None:
    async with serve(request_head_timeout=0.1) as url:
        reader, writer = await connect(url)
        assert await rest_of(reader) == b""
        writer.close()


async def test_the_second_head_on_a_connection_has_its_time_too(serve: Serve) -> None:
    async with serve(request_head_timeout=0.2) as url:
        wire = await connect(url)
        for _ in range(3):  # each in time
            assert (await answer_on(wire, VERSION)).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(0.1)
        wire[1].write(HALF)
        await rest_of(wire[0])
        wire[1].close()


async def test_an_answer_may_take_longer_than_a_head(engine: FakeEngine, serve: Serve) -> None:
    engine.gate.clear()
    async with serve(request_head_timeout=0.1) as url:
        wire = await connect(url)
        answer = asyncio.create_task(answer_on(wire, GENERATE))
        await eventually(lambda: engine.growing)
        wire[1].write(HALF)  # the next one, in advance
        await asyncio.sleep(0.3)
        engine.gate.set()
        assert (await answer).startswith(b"HTTP/1.1 200 ")
        wire[1].write(b"b: c\r\n")
        await rest_of(wire[0])
        wire[1].close()


# ── a process that stands still ─────────────────────────────────────────────────────────────────


def stand_still(seconds: float, meanwhile: Callable[[], object]) -> None:
    """Have the event loop look for what has come, find nothing, and be stopped for so long then.

    So it is when a process is stopped (SIGSTOP), or its machine, while it waits for clients.
    """
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]

    def select(timeout: float | None) -> list[object]:
        del selector.select
        meanwhile()
        time.sleep(seconds)
        return []

    selector.select = select


@pytest.fixture(params=["first", "second"])
async def asked_meanwhile(
    request: pytest.FixtureRequest, serve: Serve
) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
    """Answers a request that comes while the server stands still beyond its connection's time.

    It is the first on the connection, or the second one, before which this was kept alive.
    """
    is_first = request.param == "first"
    settings = {"request_head_timeout": 0.2} if is_first else {"http_timeout_keep_alive": 1}
    async with serve(**settings) as url:
        wire = await connect(url)
        await asyncio.sleep(0.05)  # it is accepted
        if not is_first:
            await answer_on(wire, VERSION)
        client = wire[1].get_extra_info("socket")

        async def ask() -> bytes:
            stand_still(1.2, lambda: socket.socket.send(client._sock, VERSION))
            return await answer_on(wire, b"")

        yield ask
        wire[1].close()


async def test_what_comes_while_the_server_stands_still_is_answered(
    asked_meanwhile: Callable[[], Awaitable[bytes]],
) -> None:
    assert (await asked_meanwhile()).startswith(b"HTTP/1.1 200 ")


async def test_a_clock_that_is_believed_at_once_would_lose_it(
    asked_meanwhile: Callable[[], Awaitable[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "once_more", lambda _, then: then())
    with pytest.raises(ConnectionResetError):
        await asked_meanwhile()


async def test_a_client_that_stood_still_with_the_server_has_its_time_yet(serve: Serve) -> None:
    async with serve(request_head_timeout=0.2) as url:
        wire = await connect(url)
        await asyncio.sleep(0.05)
        stand_still(1.0, lambda: None)
        await asyncio.sleep(0.1)
        assert (await answer_on(wire, VERSION)).startswith(b"HTTP/1.1 200 ")
        wire[1].close()


async def test_zero_waits_for_any_head(serve: Serve) -> None:
    async with serve(request_head_timeout=0) as url:
        reader, writer = await connect(url, VERSION[:20])
        await asyncio.sleep(0.2)
        writer.write(VERSION[20:])
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_head_without_end_is_not_kept(serve: Serve) -> None:
    async with serve() as url:
        reader, writer = await connect(url, HALF)
        answer = asyncio.create_task(rest_of(reader))
        sent = 0
        while not answer.done() and sent < 100 * MAX_HEAD_BYTES:
            writer.write(b"a: b\r\n" * 1000)
            sent += 6000
            await asyncio.sleep(0.002)
        assert (await answer)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400"), "h11 says 400 itself"
        assert sent < 10 * MAX_HEAD_BYTES
        writer.close()


async def test_requests_sent_in_advance_are_not_made_before_their_turn(
    engine: FakeEngine, http_protocol: type[H11Protocol]
) -> None:
    made: list[H11Protocol] = []

    def make(**of_uvicorn: Any) -> H11Protocol:
        made.append(http_protocol(**of_uvicorn))
        return made[-1]

    engine.gate.clear()
    async with serving(engine, ServerConfig(), make) as url:
        wire = await connect(url, GENERATE + VERSION * 3000)
        await eventually(lambda: engine.growing)
        await asyncio.sleep(0.1)
        assert len(getattr(made[0], "pipeline", ())) <= 2
        engine.gate.set()
        assert b'"choices"' in await answer_on(wire, b"")
        for _ in range(3000):
            assert (await answer_on(wire, b"")).startswith(b"HTTP/1.1 200 ")
        wire[1].close()


async def test_with_too_many_connections_the_one_goes_that_waits_the_longest(
    engine: FakeEngine, serve: Serve
) -> None:
    engine.gate.clear()
    async with serve(max_connections=3) as url:
        busy = await connect(url)
        answer = asyncio.create_task(answer_on(busy, GENERATE))
        await eventually(lambda: engine.growing)
        idle = [await connect(url, HALF) for _ in range(2)]
        fourth = await connect(url)
        assert (await answer_on(fourth, VERSION)).startswith(b"HTTP/1.1 200 ")
        assert await rest_of(idle[0][0]) == b"", "the first of those that ask nothing"
        assert (await answer_on(idle[1], b"a: b\r\nContent-Length: 0\r\n\r\n"))[9:12] == b"400"
        engine.gate.set()
        assert (await answer).startswith(b"HTTP/1.1 200 "), "a request keeps its connection"
        for _, writer in (busy, *idle, fourth):
            writer.close()


async def test_the_one_goes_whose_last_answer_ended_first(engine: FakeEngine, serve: Serve) -> None:
    engine.gate.clear()
    async with serve(max_connections=2) as url:
        first, second = await connect(url), await connect(url)
        answer = asyncio.create_task(answer_on(first, GENERATE))
        await eventually(lambda: engine.growing)
        await answer_on(second, VERSION)
        engine.gate.set()
        await answer  # its request came first, and it is idle for a shorter time
        third = await connect(url)
        assert (await answer_on(third, VERSION)).startswith(b"HTTP/1.1 200 ")
        assert await rest_of(second[0]) == b""
        assert (await answer_on(first, VERSION)).startswith(b"HTTP/1.1 200 ")
        for _, writer in (first, second, third):
            writer.close()


async def test_a_request_that_came_during_another_answer_keeps_its_connection(
    engine: FakeEngine, serve: Serve
) -> None:
    engine.gate.clear()
    async with serve(max_connections=1) as url:
        busy = await connect(url)
        assert (await answer_on(busy, VERSION + GENERATE)).startswith(b"HTTP/1.1 200 ")
        await eventually(lambda: engine.growing)
        refused = await connect(url)
        assert (await rest_of(refused[0])).startswith(b"HTTP/1.1 503 ")
        engine.gate.set()
        assert (await answer_on(busy, b"")).startswith(b"HTTP/1.1 200 ")
        await eventually(lambda: not engine.growing)
        other = await connect(url)
        assert (await answer_on(other, VERSION)).startswith(b"HTTP/1.1 200 "), "it is idle now"
        assert await rest_of(busy[0]) == b""
        for _, writer in (busy, refused, other):
            writer.close()


async def test_a_connection_that_its_client_closed_makes_no_room_twice(serve: Serve) -> None:
    async with serve(max_connections=2, request_head_timeout=60) as url:
        closed, idle = await connect(url), await connect(url)
        closed[1].close()
        others = [await connect(url) for _ in range(2)]
        for other in others:
            assert (await answer_on(other, VERSION)).startswith(b"HTTP/1.1 200 ")
        assert await rest_of(idle[0]) == b""
        for _, writer in (idle, *others):
            writer.close()


async def test_an_answer_that_is_not_read_does_not_keep_a_connection_beyond_the_limit(
    engine: FakeEngine, http_protocol: type[H11Protocol]
) -> None:
    made: list[H11Protocol] = []

    def make(**of_uvicorn: Any) -> H11Protocol:
        made.append(http_protocol(**of_uvicorn))
        return made[-1]

    async with serving(engine, ServerConfig(max_connections=1), make) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as deaf:
            await eventually(lambda: made and made[0].transport)
            while not made[0].transport.get_write_buffer_size():  # type: ignore[attr-defined]
                deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
                cycle = made[0].cycle
                await eventually(
                    lambda cycle=cycle: (
                        made[0].cycle is not cycle and made[0].cycle.response_complete
                    )
                )
            other = await connect(url)
            assert (await answer_on(other, VERSION)).startswith(b"HTTP/1.1 200 ")
            server_side = made[0].transport.get_extra_info("socket")
            await eventually(lambda: server_side.fileno() < 0)
        other[1].close()


async def test_when_all_connections_are_in_use_a_further_one_is_told_so(
    engine: FakeEngine, serve: Serve
) -> None:
    engine.gate.clear()
    async with serve(max_connections=2) as url:
        busy = [await connect(url, GENERATE) for _ in range(2)]
        await eventually(lambda: len(engine.growing) == 2)
        async with httpx.AsyncClient(base_url=url) as client:
            refused = await client.get("/version")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "--max-connections" in refused.json()["error"]["message"]
        silent = await connect(url)
        assert (await rest_of(silent[0])).startswith(b"HTTP/1.1 503 ")
        engine.gate.set()
        for reader, _ in busy:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, writer in (*busy, silent):
            writer.close()


async def test_those_that_are_told_of_a_refusal_are_bounded_too(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.server.http.connections.MAX_REFUSALS", 2)
    engine.gate.clear()
    async with serving(engine, ServerConfig(max_connections=1)) as url:
        busy = await connect(url, GENERATE)
        await eventually(lambda: engine.growing)
        for _ in range(2):  # the second time, the first ones have been told
            refused = [await connect(url) for _ in range(3)]
            answers = [await rest_of(reader) for reader, _ in refused]
            assert [answer[9:12] for answer in answers] == [b"503", b"503", b""]
            for _, writer in refused:
                writer.close()
        engine.gate.set()
        busy[1].close()


async def test_a_thousand_half_sent_heads_leave_requests_as_they_were(engine: FakeEngine) -> None:
    config = ServerConfig(max_connections=500, request_head_timeout=60)
    async with serving(engine, config) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            half_sent = []
            for count in range(1000):
                half_sent.append(await connect(url, HALF))
                if count % 100 == 0:
                    body = {"prompt": "hi", "max_tokens": 3}
                    assert (await client.post("/v1/completions", json=body)).status_code == 200
        for _, writer in half_sent:
            writer.transport.abort()


@pytest.mark.parametrize("seconds", [1e12, float("inf"), 1e-9])
async def test_any_time_to_read_an_answer_can_be_set(serve: Serve, seconds: float) -> None:
    async with serve(response_read_timeout=seconds) as url, httpx.AsyncClient() as http:
        assert (await http.get(f"{url}/version")).status_code == 200


async def test_one_address_takes_no_more_than_its_connections(serve: Serve) -> None:
    async with serve(max_connections_per_address=2) as url:
        wires = [await connect(url) for _ in range(2)]
        for wire in wires:
            assert (await answer_on(wire, VERSION)).startswith(b"HTTP/1.1 200 ")
        reader, writer = await connect(url)
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"--max-connections-per-address" in answer
        writer.close()
        other = socket.socket()
        other.bind(("127.0.0.2", 0))
        other.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        others = await asyncio.open_connection(sock=other)
        assert (await answer_on(others, VERSION)).startswith(b"HTTP/1.1 200 ")
        wires.pop()[1].close()  # makes room for another one
        async with asyncio.timeout(5):
            while True:
                wires.append(await connect(url, VERSION))
                if (await wires[-1][0].readline()).startswith(b"HTTP/1.1 200 "):
                    break
        for _, writer in (*wires, others):
            writer.close()
