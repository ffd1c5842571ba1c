"""How many connections there may be, and how long each may take to say what it wants.

uvicorn waits for ever for a request's head, so clients that send half of one, or a byte a second,
could take all of the system's files; so could those that read nothing of their answers. Each of its
connections is wrapped here: the head must come in --request-head-timeout, of an answer something
must be taken in --response-read-timeout, and when there are too many connections, the one goes that
has been without a request for the longest. A connection counts from the moment when it is accepted,
before any TLS handshake. Knows nothing of requests but how far they have come.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Scope

from lora_serve.config import ServerConfig
from lora_serve.errors import InvalidRequestError
from lora_serve.server.http.addresses import AddressLimit, address_of
from lora_serve.server.http.errors import (
    HeadTimeoutError,
    HeadTooLargeError,
    TooManyConnectionsError,
    error_response,
)
from lora_serve.server.http.paced_input import PacedInput, ParsingTurns
from lora_serve.server.http.standstill import once_more
from lora_serve.server.http.system_limits import allowed_connections, limit_unread

MAX_HEAD_BYTES = 64 * 1024
REFUSAL_SECONDS = 1.0  # in which a refused client may send something, and so read why
MAX_REFUSALS = 32  # that are told why at once: they too take files, and further ones are closed


class Cycle(Protocol):
    """One request and its answer, as uvicorn keeps them."""

    scope: Scope
    more_body: bool  # of the request, which is still to come
    response_complete: bool


class HTTPConnection(Protocol):
    """What uvicorn's two protocols, on h11 and on httptools, have in common.

    cycle: the latest request whose head was complete; None before the first one.
    scope: of the request that is being read, which with httptools is not yet cycle's.
    on_response_complete: called when a cycle's last bytes were written; begins with the request
    that has come meanwhile.
    send_400_response: called with a text when what came is no HTTP.
    timeout_keep_alive_handler: called when no request has followed an answer in time, by the clock
    timeout_keep_alive_task, which is stopped when anything comes.
    """

    cycle: Cycle | None
    scope: Scope
    on_response_complete: Callable[[], None]
    send_400_response: Callable[[str], None]
    timeout_keep_alive_handler: Callable[[], None]
    timeout_keep_alive_task: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.Transport | PacedInput) -> None: ...

    def data_received(self, data: bytes) -> None: ...

    def eof_received(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class Connections:
    """All connections of a server. `protocol` is what uvicorn calls for each."""

    def __init__(self, config: ServerConfig, http_protocol: Callable[..., Any]) -> None:
        """http_protocol: makes an HTTPConnection of uvicorn's arguments."""
        self.head_timeout = config.request_head_timeout
        self.read_timeout = config.response_read_timeout
        self.parsing_turns = ParsingTurns()
        self._limit = allowed_connections(config.max_connections)
        self._by_address = AddressLimit(config.max_connections_per_address)
        self._http_protocol = http_protocol
        self._open: set[GuardedConnection] = set()
        # of the open ones those without a request, the longest first; no dict, whose first key is
        # behind the places of all that were deleted
        self._idle: OrderedDict[GuardedConnection, None] = OrderedDict()
        self._num_refusals = 0  # that are being told

    @property
    def has_unsent(self) -> bool:
        """There are bytes that no client, nor the system for it, has taken yet."""
        return any(connection.has_unsent for connection in self._open)

    def unfinished(self) -> tuple[list[GuardedConnection], list[GuardedConnection]]:
        """Requests whose answers the server still makes, and that wait for their clients."""
        stalled = [connection for connection in self._open if connection.is_stalled]
        answering = {connection for connection in self._open if connection.is_answering}
        return list(answering.difference(stalled)), stalled

    def protocol(self, **of_uvicorn: Any) -> asyncio.Protocol:
        return GuardedConnection(self._http_protocol(**of_uvicorn), self)

    def admit(self, connection: GuardedConnection) -> None:
        """Count a new one, if there is room for it or can be made.

        Raises:
            TooManyConnectionsError: all others have requests that are being answered, or its
                address has as many as it may.
        """
        self._by_address.check(connection.address)
        if len(self._open) >= self._limit:
            if not self._idle:
                raise TooManyConnectionsError(
                    f"connections in use: {self._limit}, and no more are allowed "
                    "(--max-connections, or the system's limit of open files); retry later"
                )
            idle = next(iter(self._idle))
            self.forget(idle)
            idle.abort()
        self._open.add(connection)
        self._by_address.add(connection.address)
        self._idle[connection] = None

    def begin_refusal(self) -> bool:
        """Whether a refused connection may be told why; `end_refusal` follows then."""
        if self._num_refusals >= MAX_REFUSALS:
            return False
        self._num_refusals += 1
        return True

    def end_refusal(self) -> None:
        self._num_refusals -= 1

    def note_request(self, connection: GuardedConnection) -> None:
        """A request has come."""
        self._idle.pop(connection, None)

    def note_idle(self, connection: GuardedConnection) -> None:
        """All its requests are answered. uvicorn reports none whose connection was lost."""
        assert connection in self._open, "an answer on a connection that is gone"
        self._idle[connection] = None

    def forget(self, connection: GuardedConnection) -> None:
        if connection in self._open:
            self._open.remove(connection)
            self._by_address.remove(connection.address)
        self._idle.pop(connection, None)


class GuardedConnection(asyncio.Protocol):
    """One of uvicorn's connections, and a clock that runs while no request is there."""

    def __init__(self, inner: HTTPConnection, connections: Connections) -> None:
        self.address = ""  # the client's, from its admission on
        self._inner = inner
        self._inner_has_answered = inner.on_response_complete
        inner.on_response_complete = self._has_answered
        self._inner_is_unused = inner.timeout_keep_alive_handler
        inner.timeout_keep_alive_handler = self._seems_unused
        inner.send_400_response = self._refuse_other_protocols
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._input: PacedInput | None = None  # None before there is a transport, or if refused
        self._clock: asyncio.TimerHandle | None = None  # runs while a head is waited for
        self._num_head_bytes = 0
        self._accepted: socket.socket | None = None  # until there is a transport
        self._refusal: TooManyConnectionsError | None = None

    @property
    def head_timeout(self) -> float:
        return self._connections.head_timeout

    @property
    def is_answering(self) -> bool:
        cycle = self._inner.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def has_unsent(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    @property
    def is_stalled(self) -> bool:
        """Its client has not taken all that was written, or not sent all of its request."""
        cycle = self._inner.cycle
        return self.has_unsent or (self.is_answering and cycle is not None and cycle.more_body)

    def admit(self, accepted: socket.socket, *, can_tell: bool) -> bool:
        """Count a connection that has been accepted; whether it is to be opened.

        can_tell: a refusal could be read, since no handshake comes first.
        """
        self._accepted = accepted
        self.address = address_of(accepted)
        try:
            self._connections.admit(self)
        except TooManyConnectionsError as error:
            self._refusal = error
            return can_tell and self._connections.begin_refusal()
        return True

    def discard_unless_open(self) -> None:
        """Forget a connection whose handshake failed, or that was closed during it."""
        self._accepted = None
        if self._transport is None:
            self._end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), f"{transport!r} is no stream"
        self._transport = transport
        if self._refusal is not None:
            transport.write(as_http(error_response(self._refusal)))
            self._start_clock(REFUSAL_SECONDS, self.close)
            return
        limit_unread(transport, self._connections.read_timeout)
        self._input = PacedInput(transport, self._parse, self._connections.parsing_turns)
        self._inner.connection_made(self._input)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._input is None:
            self.close()
        else:
            self._input.receive(data)

    def eof_received(self) -> None:
        if self._refusal is None:
            self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._end()
        if self._input is not None:
            self._input.drop()
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._refusal is None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._refusal is None:
            self._inner.resume_writing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close it at once: an answer that its client does not read would keep it open for ever."""
        if self._transport is not None:
            self._transport.abort()
        elif self._accepted is not None:  # the handshake ends with it
            with contextlib.suppress(OSError):
                self._accepted.shutdown(socket.SHUT_RDWR)

    def _parse(self, data: bytes) -> None:
        cycle = self._inner.cycle
        is_in_head = cycle is None or self._inner.scope is not cycle.scope
        self._inner.data_received(data)
        if self._inner.cycle is not cycle:
            self._head_has_come()
            return
        if not self.is_answering:
            self._await_head()
        self._num_head_bytes += len(data) if is_in_head else 0
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                HeadTooLargeError(
                    f"the request's head is larger than {MAX_HEAD_BYTES} bytes; send fewer or "
                    "shorter headers"
                )
            )

    def _end(self) -> None:
        if self._refusal is None:
            self._connections.forget(self)
        else:
            self._connections.end_refusal()

    def _await_head(self) -> None:
        """Start the clock at the connection's beginning or first byte: later bytes add no time."""
        if self._clock is None and self._connections.head_timeout:
            self._start_clock(self._connections.head_timeout, self._head_seems_late)

    def _head_has_come(self) -> None:
        self._stop_clock()
        self._num_head_bytes = 0
        self._connections.note_request(self)

    def _has_answered(self) -> None:
        self._inner_has_answered()
        if not self.is_answering:
            self._connections.note_idle(self)

    def _head_seems_late(self) -> None:
        assert self._clock is not None, "a clock has rung"
        self._clock = once_more(self._clock, self._head_is_late)

    def _seems_unused(self) -> None:
        """Do as for a late head, where uvicorn would close a connection that it kept alive."""
        clock = self._inner.timeout_keep_alive_task
        assert clock is not None, "a clock has rung"
        self._inner.timeout_keep_alive_task = once_more(clock, self._inner_is_unused)

    def _head_is_late(self) -> None:
        if not self._num_head_bytes:
            self.close()  # nothing was asked, or the rest of a refused body never ends
            return
        self._refuse(
            HeadTimeoutError(
                "the request's head had not come in "
                f"{self._connections.head_timeout:g} s; send it faster, or raise "
                "--request-head-timeout"
            )
        )

    def _refuse_other_protocols(self, _: str) -> None:
        self._refuse(
            InvalidRequestError(
                "what came is no HTTP/1.1 request; send one, and https only to a server with "
                "--ssl-certfile"
            )
        )

    def _refuse(self, error: InvalidRequestError) -> None:
        self._stop_clock()
        assert self._transport is not None, "data before a connection"
        if not (self._transport.is_closing() or self.is_answering):
            self._transport.write(as_http(error_response(error)))
        self.close()

    def _start_clock(self, seconds: float, then: Callable[[], None]) -> None:
        self._clock = asyncio.get_running_loop().call_later(seconds, then)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def as_http(response: Response) -> bytes:
    """The bytes of an answer after which the connection is closed."""
    head = f"HTTP/1.1 {response.status_code} {http.HTTPStatus(response.status_code).phrase}\r\n"
    lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return head.encode() + b"".join(lines) + b"connection: close\r\n\r\n" + bytes(response.body)
