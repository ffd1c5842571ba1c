"""Messages between two processes of one machine, none of which is waited for without an end."""

from __future__ import annotations

import select
import socket
import struct
import time

from lora_serve.distributed.limits import TimeLimit
from lora_serve.errors import RankLostError

_HEAD = struct.Struct("<Q")


class _Wait:
    """One wait for the other end. limit: None for one without an end."""

    def __init__(self, limit: TimeLimit | None) -> None:
        self.limit = limit
        self._begin = time.monotonic()

    def left_ms(self) -> float | None:
        if self.limit is None:
            return None
        return 1000 * max(0.0, self._begin + self.limit.seconds - time.monotonic())


class Link:
    """One end. One thread may send while another receives."""

    def __init__(self, end: socket.socket, other: str) -> None:
        """other: how errors name who is at the other end."""
        end.setblocking(False)
        self._end = end
        self._other = other

    def send(self, *parts: bytes | memoryview, limit: TimeLimit) -> None:
        """Send one message, given in parts.

        Raises:
            RankLostError: the other end is closed, or did not take it in time.
        """
        wait = _Wait(limit)
        self._send_all(_HEAD.pack(sum(memoryview(part).nbytes for part in parts)), wait)
        for part in parts:
            self._send_all(part, wait)

    def receive(self, limit: TimeLimit | None) -> bytearray:
        """The next message. limit: None to wait for ever.

        Raises:
            RankLostError: the other end is closed, or nothing came in time.
        """
        wait = _Wait(limit)
        (size,) = _HEAD.unpack(self._receive_all(_HEAD.size, wait))
        return self._receive_all(size, wait)

    def has_message(self, seconds: float) -> bool:
        """Whether one has come, or the other end was closed, within so many seconds.

        Raises:
            RankLostError: this end is closed.
        """
        return bool(self._poll(select.POLLIN).poll(seconds * 1000))

    def close(self) -> None:
        self._end.close()

    def _send_all(self, part: bytes | memoryview, wait: _Wait) -> None:
        rest = memoryview(part).cast("B")
        while rest:
            try:
                rest = rest[self._end.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, wait)
            except OSError as error:
                raise RankLostError(f"{self._other} is gone: {error}") from error

    def _receive_all(self, size: int, wait: _Wait) -> bytearray:
        message = bytearray(size)
        rest = memoryview(message)
        while rest:
            try:
                count = self._end.recv_into(rest)
            except BlockingIOError:
                self._wait(select.POLLIN, wait)
                continue
            except OSError as error:
                raise RankLostError(f"{self._other} is gone: {error}") from error
            if not count:
                raise RankLostError(f"{self._other} is gone")
            rest = rest[count:]
        return message

    def _poll(self, events: int) -> select.poll:
        poll = select.poll()
        try:
            poll.register(self._end, events)
        except ValueError as error:  # another thread has closed this end
            raise RankLostError(f"the link to {self._other} is closed") from error
        return poll

    def _wait(self, events: int, wait: _Wait) -> None:
        if not self._poll(events).poll(wait.left_ms()):
            raise RankLostError(f"{self._other} hangs: it has not answered in {wait.limit}")


def new_link(other: str) -> tuple[Link, socket.socket]:
    """An end for this process, and one for the process that is named `other`."""
    own, theirs = socket.socketpair()
    return Link(own, other), theirs
