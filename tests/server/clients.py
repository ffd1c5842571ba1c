"""Ways to talk to a server: in memory, or over a socket when a client has to be able to leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from starlette.routing import BaseRoute, Route
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lora_serve.config import ServerConfig
from lora_serve.server.app import create_app
from lora_serve.server.engine_api import Engine
from lora_serve.server.error_shapes import LOAD_PATH, UNLOAD_PATH
from lora_serve.server.http.acceptor import AcceptingServer
from lora_serve.server.http.connections import Connections
from lora_serve.server.http.serving import http_config
from tests.fakes.engine import FakeEngine

Json = dict[str, object]
T = TypeVar("T")


def client_for(engine: Engine, config: ServerConfig | None = None) -> httpx.AsyncClient:
    """A client in memory. An exception that leaves the application fails the test."""
    app = create_app(engine, config or ServerConfig())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@asynccontextmanager
async def serving(
    engine: FakeEngine,
    config: ServerConfig | None = None,
    http_protocol: Callable[..., Any] = AutoHTTPProtocol,
) -> AsyncIterator[str]:
    """A real server on a free port of this machine; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = config or ServerConfig()
    connections = Connections(config, http_protocol)
    server = AcceptingServer(http_config(create_app(engine, config), config, connections))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        scheme = "https" if server.config.is_ssl else "http"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        done, _ = await asyncio.wait({task}, timeout=5)
        server.force_exit = not done  # a request that never ends must not hide what went wrong
        await task


def events(text: str) -> list[Json]:
    """The events of a stream that has ended as it should."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def error_of(response: httpx.Response, status: int) -> Json:
    """The error of an answer, which has this status, and the shape of the route's API."""
    assert response.status_code == status, response.text
    body = response.json()
    if f"{response.request.url.path}/".startswith("/v1/messages/"):
        assert set(body) == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert body["request_id"] == response.headers["request-id"]
        assert set(body["error"]) == {"type", "message"}
        return body["error"]
    error = body["error"]
    also = {}
    if response.request.url.path in (LOAD_PATH, UNLOAD_PATH):
        also = {"object": "error", **error}
    assert body == {"error": error, **also}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


def joined(lists: Iterable[list[T]]) -> list[T]:
    return [item for items in lists for item in items]


async def eventually(is_true: object, seconds: float = 5.0) -> None:
    """Wait until the callable says so."""
    assert callable(is_true)
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(0.005)


def known(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    """The routes of an application, which are all of a kind that is in the table."""
    for route in routes:
        assert isinstance(route, Route), f"{route} is of a kind that is not in the table"
        yield route
