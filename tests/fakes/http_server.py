"""HTTP/1.1 in its smallest form, for servers that tests make up: a handler, and an open socket."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

MAX_BODY_BYTES = 16 * 2**20


@dataclass
class Call:
    """One request. body: its JSON, or None. Writing to a client that has left raises."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    has_begun: bool = field(default=False)

    async def reply(self, document: object, status: int = 200, **headers: str) -> None:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} Said\r\nContent-Length: {len(data)}\r\n{more}\r\n"
        self.writer.write(head.encode() + data)
        await self.writer.drain()

    async def event(self, data: str) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.writer.write(b"HTTP/1.1 200 Said\r\nContent-Type: text/event-stream\r\n\r\n")
        self.writer.write(f"data: {data}\n\n".encode())
        await self.writer.drain()


Handler = Callable[[Call], Awaitable[None]]


@asynccontextmanager
async def listening(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The base URL, while each connection's one request goes to the handler.

    The handler is cancelled when its client leaves.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        tasks.add(task)
        try:
            call = await _read(reader, writer)
            await _until_it_leaves(handler(call), reader)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass  # the client left
        finally:
            tasks.discard(task)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=256, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    try:
        async with server:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        await asyncio.gather(*tasks)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    return Call(method, path, headers, json.loads(data) if data else None, writer, reader)


async def _until_it_leaves(handling: Awaitable[None], reader: asyncio.StreamReader) -> None:
    task = asyncio.ensure_future(handling)
    left = asyncio.ensure_future(reader.read(1))
    await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
    left.cancel()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await left
    with suppress(asyncio.CancelledError):
        await task


@contextmanager
def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The same in a thread with a loop of its own, for tests of what runs a loop itself."""
    loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with listening(handler, tls) as url:
            urls.append(url)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()
