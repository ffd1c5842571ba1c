"""Opens Redis or Valkey, and words what goes wrong. Keeps no connection open.

The client library reads whatever a server sends, as long as it sends it, before it gives back any
of it, and makes objects of it that may take twenty times its bytes. So what one question may be
answered with is bounded where it is received: in bytes, in lines, and in time.

The client library is an extra: importing this module without it is a ModuleNotFoundError.
"""

from __future__ import annotations

import math
import time
from typing import Any, NoReturn
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lora_serve.errors import ConfigError

MAX_REASON_CHARS = 200
BYTES_PER_LINE = 64  # of the longest answer: so it may have 2**20 lines of 64 MiB
_CONNECTIONS = {
    "redis": redis.Connection,
    "rediss": redis.SSLConnection,
    "unix": redis.UnixDomainSocketConnection,
}


class _BoundedSocket:
    """A socket that gives up a server which sends too much after what was last sent to it.

    Or which is at it for too long. Each value begins with a line; that of bytes has two, and may
    hold more.
    """

    def __init__(self, socket: Any, limit: int, seconds: float) -> None:
        self._socket = socket
        self._limit, self._seconds = limit, seconds
        self._begin_answer()

    def sendall(self, data: bytes) -> None:
        self._begin_answer()
        self._socket.sendall(data)

    def _begin_answer(self) -> None:
        self._left, self._lines_left = self._limit, self._limit // BYTES_PER_LINE
        self._end = time.monotonic() + self._seconds
        self._last = b""

    def recv(self, size: int) -> bytes:
        received: bytes = self._socket.recv(size)
        self._count(received)
        return received

    def recv_into(self, buffer: bytearray) -> int:  # for hiredis
        num_received: int = self._socket.recv_into(buffer)
        self._count(bytes(memoryview(buffer)[:num_received]))
        return num_received

    def _count(self, received: bytes) -> None:
        self._left -= len(received)
        self._lines_left -= received.count(b"\r\n")
        self._lines_left -= self._last == b"\r" and received[:1] == b"\n"
        self._last = received[-1:]
        if self._left < 0:
            self._give_up(f"with more than {self._limit / 2**20:g} MiB")
        if self._lines_left < 0:
            self._give_up(f"with more than {self._limit // BYTES_PER_LINE} lines")
        if received and time.monotonic() > self._end:
            self._give_up(f"for more than {self._seconds:g} s")

    def _give_up(self, what: str) -> NoReturn:
        raise redis.ConnectionError(
            f"it answers {what}, and is not listened to any longer; see what serves this address"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def open_redis(
    flag: str,
    url: str,
    password: str | None,
    timeout_seconds: float,
    max_answer_bytes: int,
    max_answer_seconds: float = math.inf,
    **options: Any,
) -> Any:
    """A client that connects when first used, and tries nothing twice by itself.

    Args:
        flag: which names the URL, for errors; its password's flag and variable follow from it.
        password: the server's, if it does not stand in the URL.
        timeout_seconds: how long each answer, and a connection, may take.
        max_answer_bytes: what a command, or a pipeline of them, may be answered with.
        max_answer_seconds: for which the answer may go on, however steadily it comes.
        options: more of redis-py's own.

    Raises:
        ConfigError: a URL that names no server.
    """
    _check_url(flag, url, password)
    try:
        # any: redis-py types every answer as maybe awaitable
        client: Any = redis.Redis.from_url(
            url,
            password=password,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),  # the caller decides when to try again
            protocol=2,
            connection_class=_bounded(url, max_answer_bytes, max_answer_seconds),
            **options,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag}: {error}") from error
    return client


def _bounded(url: str, max_answer_bytes: int, max_answer_seconds: float) -> Any:
    """The library's class of connections for such a URL, with a bounded socket."""
    kind: Any = _CONNECTIONS.get(urlsplit(url).scheme, redis.Connection)

    class Bounded(kind):  # type: ignore[misc]
        def _connect(self) -> _BoundedSocket:
            return _BoundedSocket(super()._connect(), max_answer_bytes, max_answer_seconds)

    return Bounded


def reason_of(error: Exception) -> str:
    """The server's error as one printable line.

    redis-py puts a pipeline's command before it, with its raw bytes.
    """
    said = str(error).rpartition("of pipeline caused error: ")[2].rstrip(".")
    said = said or type(error).__name__
    line = "".join(char if char.isprintable() else "?" for char in said[:MAX_REASON_CHARS])
    return line + "..." if len(said) > MAX_REASON_CHARS else line


def _check_url(flag: str, url: str, password: str | None) -> None:
    """Raises ConfigError for what redis-py would quote in a message, or take one of two of."""
    parts = urlsplit(url)
    password_flag = f"{flag.removesuffix('-url')}-password-file"
    variable = "LORA_SERVE_" + flag.removesuffix("-url").lstrip("-").replace("-", "_").upper()
    hint = (
        f"if that is its password, write its /, @, :, ? and # as %2F, %40, %3A, %3F and %23, or "
        f"use {password_flag}"
    )
    try:
        _ = parts.port
    except ValueError:
        raise ConfigError(f"{flag}: its port is no number; {hint}") from None
    if "@" in parts.path + parts.query + parts.fragment:
        raise ConfigError(f"{flag}: has an @ behind its server's name; {hint}")
    if password is not None and parts.password is not None:
        raise ConfigError(
            f"{flag}: has a password, and another one is given by {password_flag} "
            f"or {variable}_PASSWORD; leave one out"
        )
