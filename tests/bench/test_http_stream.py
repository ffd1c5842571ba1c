from __future__ import annotations

import asyncio

import pytest

from lora_serve.bench.http_stream import HttpFault, Origin, Response, request
from lora_serve.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h:8000", Origin("http", "h", 8000, "")),
        ("localhost:8000/v1/", Origin("http", "localhost", 8000, "")),
        ("https://h/base/v1", Origin("https", "h", 443, "/base")),
        ("http://[::1]:90", Origin("http", "::1", 90, "")),
    ],
)
def test_a_base_url_is_read_with_or_without_its_v1(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin


@pytest.mark.parametrize("url", ["ftp://h", "http://", ""])
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Origin.parse(url)


def response(body: bytes, **headers: str) -> Response:
    reader = asyncio.StreamReader()
    reader.feed_data(body)
    reader.feed_eof()
    return Response(200, {name.replace("_", "-"): value for name, value in headers.items()}, reader)


async def test_events_are_whole_however_the_bytes_were_cut() -> None:
    chunks = b"6\r\ndata: \r\n3;x=1\r\none\r\nd\r\n\n\ndata: two\n\n\r\n0\r\n\r\n"
    events = response(chunks, transfer_encoding="chunked").events()
    assert [event async for event in events] == [b"one", b"two"]


async def test_comments_and_other_fields_are_no_events() -> None:
    body = b": keep-alive\n\nevent: x\nid: 1\r\ndata:  a b \r\n\r\n"
    assert [event async for event in response(body).events()] == [b"a b"]


@pytest.mark.parametrize("body", [b"5\r\nab", b"5\r\nabcde\r\n", b"zz\r\n"])
async def test_a_chunked_body_that_breaks_off_is_a_fault(body: bytes) -> None:
    with pytest.raises(HttpFault):
        await response(body, transfer_encoding="chunked").read()


async def test_a_body_shorter_than_it_says_is_a_fault() -> None:
    assert await response(b"abc", content_length="3").read() == b"abc"
    with pytest.raises(HttpFault):
        await response(b"ab", content_length="3").read()


@pytest.mark.parametrize("answer", [b"", b"hello\r\n\r\n", b"SSH-2.0 no\r\n"])
async def test_what_speaks_no_http_is_a_fault(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        origin = Origin("http", "127.0.0.1", server.sockets[0].getsockname()[1], "")
        with pytest.raises(HttpFault, match="no HTTP"):
            async with request(origin, "GET", "/", {}):
                pass
