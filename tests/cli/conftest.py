"""A server over HTTP without a model, in a thread, for the commands that talk to one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.fakes.engine import FakeEngine
from tests.server.clients import serving


@dataclass
class FakeServer:
    """call: what runs in the server's loop, as its engine's gate must."""

    url: str
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop

    def hold_answers(self) -> None:
        self.loop.call_soon_threadsafe(self.engine.gate.clear)

    def let_go(self) -> None:
        self.loop.call_soon_threadsafe(self.engine.gate.set)


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    """One for each test, as adapters are loaded into it."""
    started, ended = threading.Event(), asyncio.Event()
    servers: list[FakeServer] = []

    async def serve() -> None:
        engine = FakeEngine()
        async with serving(engine) as url:
            servers.append(FakeServer(url, engine, asyncio.get_running_loop()))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(60)
    try:
        yield servers[0]
    finally:
        servers[0].let_go()
        servers[0].loop.call_soon_threadsafe(ended.set)
        thread.join(60)
