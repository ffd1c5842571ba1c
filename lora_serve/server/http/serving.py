"""How an application is served: by uvicorn, on watched connections, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from lora_serve.config import ServerConfig
from lora_serve.server.http.acceptor import AcceptingServer
from lora_serve.server.http.auth import KeyRing
from lora_serve.server.http.connections import Connections
from lora_serve.server.http.listener import shown_address
from lora_serve.server.http.shutdown import LAST_WORDS_SECONDS, ServerShutdown

logger = logging.getLogger(__name__)


def http_config(app: ASGIApp, config: ServerConfig, connections: Connections) -> uvicorn.Config:
    """How uvicorn serves the application: on connections that are watched."""
    return uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # it calls what it is given
        ws="none",
        log_config=None,  # its lines are lines of the server's log
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=config.http_timeout_keep_alive,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
    )


def warn_of_open_server(config: ServerConfig) -> None:
    """Tell who may use a server that is reached from elsewhere, and asks for no key."""
    if config.is_local or config.has_keys:
        return
    logger.warning(
        "listening on %s without an API key: every client that reaches this address may use the "
        "model%s; give --api-key, or listen on 127.0.0.1",
        config.uds or config.host,
        " and change its adapters" if config.allow_runtime_lora_updating else "",
    )


class SignalledServer(AcceptingServer):
    """Says when it is ready, and leaves the process alive when it has stopped."""

    def __init__(self, config: uvicorn.Config, shutdown: ServerShutdown, keys: KeyRing) -> None:
        super().__init__(config)
        self._shutdown = shutdown
        self._keys = keys

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets, "run_server gives the socket"
        scheme = "https" if self.config.is_ssl else "http"
        sys.stdout.write(f"lora-serve is ready on {shown_address(sockets[0], scheme)}\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Unlike the base class, do not raise the signals again at the end: work remains."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._shutdown.begin, self._exit)
        loop.add_signal_handler(signal.SIGHUP, self._keys.reload_or_keep)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _exit(self) -> None:
        self.should_exit = True
