"""A system that has no file left for a connection."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

import pytest
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lora_serve.config import ServerConfig
from lora_serve.server.app import create_app
from lora_serve.server.http import acceptor
from lora_serve.server.http.connections import Connections
from lora_serve.server.http.serving import http_config
from tests.fakes.engine import FakeEngine
from tests.server.clients import eventually
from tests.server.http.test_connections import VERSION, answer_on


class FullListener(socket.socket):
    """Has no file for a connection as long as `is_full`."""

    is_full = True
    num_refused = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.is_full:
            self.num_refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_without_files_the_log_gets_one_line_and_clients_wait(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "BACK_OFF_SECONDS", 0.01)
    with FullListener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = ServerConfig()
        connections = Connections(config, AutoHTTPProtocol)
        server = acceptor.AcceptingServer(
            http_config(create_app(engine, config), config, connections)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        with caplog.at_level(logging.WARNING):
            wire = await asyncio.open_connection(*listener.getsockname())
            answer = asyncio.create_task(answer_on(wire, VERSION))
            await eventually(lambda: listener.num_refused > 5)
            assert not answer.done()
            listener.is_full = False
            assert (await answer).startswith(b"HTTP/1.1 200 ")
        assert [record.getMessage() for record in caplog.records] == [
            "no connection can be accepted: Too many open files; clients wait until others leave; "
            "raise the system's limit (ulimit -n), or lower --max-connections"
        ]
        wire[1].close()
        server.should_exit = True
        await serving
