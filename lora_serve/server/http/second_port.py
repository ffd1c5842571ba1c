"""A second address of the same process, served as long as the first one is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Generator

import uvicorn

from lora_serve.server.http.acceptor import AcceptingServer


@contextlib.asynccontextmanager
async def serving(config: uvicorn.Config, listener: socket.socket) -> AsyncIterator[None]:
    """Serve on `listener`, which listens already; at the end, end what is still being answered."""
    server = _QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="second-port")
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait({task})


class _QuietServer(AcceptingServer):
    """Leaves signals to the server on the first address."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
