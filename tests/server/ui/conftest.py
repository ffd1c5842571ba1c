from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser

from lora_serve.config import ServerConfig
from tests.fakes.browser import chromium
from tests.fakes.engine import FakeEngine
from tests.server.clients import serving


@dataclass(slots=True)
class Site:
    """A server in a thread, for a browser. `loop` is the engine's."""

    engine: FakeEngine
    url: str
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def load(self, name: str, path: str) -> None:
        loading = self.engine.load_lora_adapter(name, path)
        asyncio.run_coroutine_threadsafe(loading, self.loop).result(10)

    def open_gate(self, is_open: bool) -> None:
        gate = self.engine.gate
        self.loop.call_soon_threadsafe(gate.set if is_open else gate.clear)


Serve = Callable[[ServerConfig], AbstractContextManager[Site]]


@contextmanager
def served(config: ServerConfig) -> Iterator[Site]:
    sites: queue.Queue[Site] = queue.Queue()

    async def serve() -> None:
        engine = FakeEngine()
        async with serving(engine, config) as url:
            site = Site(engine, url, asyncio.get_running_loop())
            sites.put(site)
            await site.ended.wait()
            engine.gate.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    site = sites.get(timeout=30)
    try:
        yield site
    finally:
        site.loop.call_soon_threadsafe(site.ended.set)
        thread.join(30)


@pytest.fixture
def site() -> Iterator[Site]:
    """A server without keys: who reaches it may change it."""
    with served(ServerConfig()) as site:
        yield site


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser
