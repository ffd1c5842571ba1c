"""What servers do that mean us no good, or cannot do better: every call ends with a reason."""

from __future__ import annotations

import asyncio
import json
import ssl

import pytest
import trustme

from lora_serve.check import server as module
from lora_serve.check.server import Server, ServerFaultError, Target, without_keys
from lora_serve.errors import ConfigError
from tests.fakes.http_server import Call, Handler, listening

ANSWER = {"choices": [{"text": "said", "finish_reason": "stop"}]}


def says(data: bytes, status: int = 200) -> Handler:
    async def handler(call: Call) -> None:
        await call.reply(data, status)

    return handler


async def fault(handler: Handler, timeout_seconds: float = 20.0) -> ServerFaultError:
    async with (
        listening(handler) as url,
        Server(Target(url=url, timeout_seconds=timeout_seconds)) as server,
    ):
        with pytest.raises(ServerFaultError) as raised:
            await server.complete({})
    return raised.value


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"<html>", 200, "no JSON object"),
        (b"\xff\xfe", 200, "no JSON object"),
        (b"[" * 200_000, 200, "no JSON object"),
        (b'{"choices": NaN}', 200, "no list of choices"),
        (b'{"error": {"message": "out of memory"}}', 200, "out of memory"),
        (b'{"error": {"message": "out of memory"}}', 500, "HTTP 500: out of memory"),
        (b'{"detail": "wrong"}', 422, "HTTP 422: wrong"),
        (b"<html>oops", 502, "HTTP 502: <html>oops"),
    ],
)
async def test_no_answer_can_be_read(data: bytes, status: int, words: str) -> None:
    error = await fault(says(data, status))
    assert words in str(error)
    assert error.status == status


async def test_an_answer_that_never_comes_is_given_up() -> None:
    async def silent(call: Call) -> None:
        await asyncio.sleep(60)

    assert "no whole answer in 0.1 s (--timeout)" in str(await fault(silent, 0.1))


async def test_an_answer_that_drips_is_given_up() -> None:
    async def drips(call: Call) -> None:
        call.writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            call.writer.write(b" ")
            await call.writer.drain()
            await asyncio.sleep(0.01)

    assert "no whole answer in 0.2 s" in str(await fault(drips, 0.2))


async def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 100_000)

    async def endless(call: Call) -> None:
        call.writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            call.writer.write(b" " * 10_000)
            await call.writer.drain()

    assert "larger than 100,000 bytes" in str(await fault(endless))


async def test_what_speaks_no_http_is_told() -> None:
    async def other(call: Call) -> None:
        call.writer.write(b"220 smtp ready\r\n")
        await call.writer.drain()

    assert (await fault(other)).status == 0


async def test_nobody_there_is_told() -> None:
    async with Server(Target(url="http://127.0.0.1:1")) as server:
        with pytest.raises(ServerFaultError, match="connection"):
            await server.complete({})


async def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_SECONDS", (0.0, 0.0))
    statuses = [429, 429, 200]

    async def busy(call: Call) -> None:
        await call.reply(ANSWER, statuses.pop(0))

    async with listening(busy) as url, Server(Target(url=url)) as server:
        assert (await server.complete({})).text == "said"
    assert statuses == []


@pytest.mark.parametrize("status", [302, 307, 308])
async def test_a_redirect_to_another_server_is_told_and_not_followed(status: int) -> None:
    calls: list[Call] = []

    async def other(call: Call) -> None:
        calls.append(call)
        await call.reply(ANSWER)

    async with listening(other) as place:

        async def sends_on(call: Call) -> None:
            calls.append(call)
            await call.reply({}, status, Location=f"{place}{call.path}")

        async with (
            listening(sends_on) as url,
            Server(Target(url=url, api_key="secret", admin_api_key="admin")) as server,
        ):
            with pytest.raises(ServerFaultError, match=f"redirects to {place}.*; if that is the"):
                await server.call("POST", "/v1/load_lora_adapter", {}, is_admin=True)
    assert len(calls) == 1


async def test_redirects_are_followed_with_their_bodies() -> None:
    bodies = []

    async def moved(call: Call) -> None:
        if call.path == "/v1/completions":
            await call.reply({}, 307, Location="/elsewhere")
        else:
            bodies.append(call.body)
            await call.reply(ANSWER)

    async with listening(moved) as url, Server(Target(url=url)) as server:
        assert (await server.complete({"prompt": "x"})).text == "said"
    assert bodies == [{"prompt": "x"}]


async def test_keys_go_where_they_belong() -> None:
    sent = {}

    async def handler(call: Call) -> None:
        sent[call.path] = call.headers.get("authorization")
        await call.reply(ANSWER)

    async with listening(handler) as url:
        target = Target(url=url, api_key="one", admin_api_key="two")
        async with Server(target) as server:
            await server.complete({})
            await server.status_of("POST", "/v1/load_lora_adapter", {})
        async with Server(Target(url=url)) as server:
            await server.status_of("GET", "/v1/models")
    assert sent == {
        "/v1/completions": "Bearer one",
        "/v1/load_lora_adapter": "Bearer two",
        "/v1/models": None,
    }
    assert (without_keys(target).api_key, without_keys(target).admin_api_key) == ("", "")
    assert without_keys(Target(url="http://me:secret@host/")).url == "http://host/"


async def test_certificates_are_checked() -> None:
    authority = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    authority.configure_trust(ours)
    async with listening(says(json.dumps(ANSWER).encode()), theirs) as url:
        for verify in (ours, False):
            async with Server(Target(url=url, verify=verify)) as server:
                assert (await server.complete({})).text == "said"
        async with Server(Target(url=url)) as server:
            with pytest.raises(ServerFaultError, match="CERTIFICATE"):
                await server.complete({})


async def test_a_stream_tells_what_came_and_how_it_broke_off() -> None:
    async def breaks(call: Call) -> None:
        await call.event(json.dumps({"choices": [{"text": "one"}]}))
        await call.event(json.dumps({"choices": [{"text": " two"}]}))

    async with listening(breaks) as url, Server(Target(url=url)) as server:
        stream = server.stream({"prompt": "x"})
        await stream.until(2)
        assert (await stream.end()).text == "one two"
        assert stream.error == "the stream ended without [DONE]"
        assert [one.body["stream"] for one in server.exchanges] == [True]


@pytest.mark.parametrize("event", ["5", "}{", '{"error": {"message": "died"}}'])
async def test_a_stream_of_something_else_ends_with_an_error(event: str) -> None:
    async def odd(call: Call) -> None:
        await call.event(event)

    async with listening(odd) as url, Server(Target(url=url)) as server:
        stream = server.stream({})
        await stream.until(1)
        await stream.end()
        assert stream.error


@pytest.mark.parametrize("url", ["ftp://host", "http://", "/v1"])
def test_a_url_must_lead_to_a_server(url: str) -> None:
    with pytest.raises(ConfigError, match="want http"):
        _ = Target(url=url).base_url


def test_routes_bring_their_v1() -> None:
    assert Target(url="host:8000/v1/").base_url == "http://host:8000"
    assert Target(url="https://host/prefix/v1").base_url == "https://host/prefix"
