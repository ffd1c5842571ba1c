"""A small HTTP/1.1 client that yields a response's server-sent events as they arrive.

The client shares the machine's cores with the server it measures, so it does no more than a
benchmark needs: one connection a request, no redirects, no compression.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from lora_serve.server_url import base_url

MAX_LINE_BYTES = 2**20
DEFAULT_PORTS = {"http": 80, "https": 443}


class HttpFault(Exception):
    """The server's answer broke off or was no HTTP."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens, and the path that its routes begin with."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read a base URL, as `server_url.base_url` does. Raises ConfigError if it is none."""
        parts = urlsplit(base_url(url))
        assert parts.hostname is not None, "base_url refuses a URL without a host"
        port = parts.port or DEFAULT_PORTS[parts.scheme]
        return cls(parts.scheme, parts.hostname, port, parts.path)


@dataclass(frozen=True, slots=True)
class Response:
    """A status, and a body that is still arriving."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event; events here have one data line each."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises HttpFault if it breaks off."""
        try:
            async for piece in self._pieces():
                yield piece
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise HttpFault("the answer broke off") from error

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self.reader.readline()).partition(b";")[0], 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
        elif "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
        else:
            while piece := await self.reader.read(MAX_LINE_BYTES):
                yield piece


@asynccontextmanager
async def request(
    origin: Origin, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[Response]:
    """Send one request; the connection closes with the context.

    Raises:
        OSError: the origin cannot be reached.
        HttpFault: what answers speaks no HTTP, or falls silent before its headers.
    """
    context = ssl.create_default_context() if origin.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        origin.host, origin.port, limit=MAX_LINE_BYTES, ssl=context
    )
    try:
        writer.write(_head(origin, method, path, headers, len(body)) + body)
        await writer.drain()
        yield await _response(reader)
    finally:
        writer.close()
        with suppress(OSError):  # the server may have closed it the hard way
            await writer.wait_closed()


def _head(origin: Origin, method: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [
        f"{method} {origin.prefix}{path} HTTP/1.1",
        f"Host: {origin.host}:{origin.port}",
        "Connection: close",
        f"Content-Length: {length}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def _response(reader: asyncio.StreamReader) -> Response:
    try:
        status = int((await reader.readline()).split()[1])
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
    except (ValueError, IndexError) as error:
        raise HttpFault("no HTTP answer") from error
    return Response(status, headers, reader)
