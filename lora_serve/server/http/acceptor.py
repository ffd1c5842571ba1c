"""Accepts connections, and counts each from that moment on: before any TLS handshake.

asyncio's own servers count nothing, give a silent handshake a minute, and write thousands of
tracebacks to the log when the system has no file left for a connection. Here a handshake has
--request-head-timeout, and a system without files is asked again after a while.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable

import uvicorn

from lora_serve.server.http.connections import GuardedConnection
from lora_serve.server.http.tls import FreshTLS

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 64  # accepted before others have their turn
BACK_OFF_SECONDS = 0.5
SECONDS_BETWEEN_WARNINGS = 60.0
NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class AcceptingServer(uvicorn.Server):
    """uvicorn's server, but for how it comes by its connections.

    Its configuration's protocols must be those of `Connections`.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        tls = FreshTLS(self.config)
        self.servers: list[Acceptor] = [  # type: ignore[assignment]  # it only closes them
            Acceptor(listener, self._make_connection, tls) for listener in sockets or ()
        ]

    def _make_connection(self) -> GuardedConnection:
        connection = self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn does
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        assert isinstance(connection, GuardedConnection), f"{connection!r} is not counted"
        return connection


class Acceptor:
    """Takes what comes to one listener, until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        make_connection: Callable[[], GuardedConnection],
        tls: FreshTLS,
    ) -> None:
        listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_connection = make_connection
        self._tls = tls
        self._warned_at = -SECONDS_BETWEEN_WARNINGS
        self._later: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._begin()

    def close(self) -> None:
        """Accept nothing more, and end the handshakes. The listener is its owner's to close."""
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._listener)
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _begin(self) -> None:
        self._later = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._back_off(error)
                return
            self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = self._make_connection()
        tls = self._tls.context()
        if not connection.admit(accepted, can_tell=tls is None):
            accepted.close()
            return
        task = self._loop.create_task(self._open(connection, accepted, tls))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(
        self, connection: GuardedConnection, accepted: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        """Give the connection its transport, behind a handshake if there is one."""
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=(connection.head_timeout or None) if tls else None,
            )
        except OSError as error:  # TLS's errors, and its timeout, are such
            logger.debug("a connection could not be opened: %s", error)
        finally:
            connection.discard_unless_open()

    def _back_off(self, error: OSError) -> None:
        if error.errno not in NO_RESOURCES:
            raise error
        self._loop.remove_reader(self._listener)
        self._later = self._loop.call_later(BACK_OFF_SECONDS, self._begin)
        if time.monotonic() - self._warned_at >= SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            logger.warning(
                "no connection can be accepted: %s; clients wait until others leave; raise the "
                "system's limit (ulimit -n), or lower --max-connections",
                error.strerror,
            )
