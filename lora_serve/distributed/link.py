"""Messages between two processes of one machine, none of which is waited for without an end."""

from __future__ import annotations

import select
import socket
import struct
import time

from lora_serve.errors import RankLostError

_HEAD = struct.Struct("<Q")


class Link:
    """One end. One thread may send while another receives."""

    def __init__(self, end: socket.socket, other: str) -> None:
        """other: how errors name who is at the other end."""
        end.setblocking(False)
        self._end = end
        self._other = other

    def send(self, *parts: bytes | memoryview, seconds: float) -> None:
        """Send one message, given in parts.

        Raises:
            RankLostError: the other end is closed, or did not take it in time.
        """
        deadline = time.monotonic() + seconds
        self._send_all(_HEAD.pack(sum(memoryview(part).nbytes for part in parts)), deadline)
        for part in parts:
            self._send_all(part, deadline)

    def receive(self, seconds: float | None) -> bytearray:
        """The next message. seconds: None to wait for ever.

        Raises:
            RankLostError: the other end is closed, or nothing came in time.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        (size,) = _HEAD.unpack(self._receive_all(_HEAD.size, deadline))
        return self._receive_all(size, deadline)

    def has_message(self, seconds: float) -> bool:
        """Whether one has come, or the other end was closed, within so many seconds.

        Raises:
            RankLostError: this end is closed.
        """
        return bool(self._poll(select.POLLIN).poll(seconds * 1000))

    def close(self) -> None:
        self._end.close()

    def _send_all(self, part: bytes | memoryview, deadline: float) -> None:
        rest = memoryview(part).cast("B")
        while rest:
            try:
                rest = rest[self._end.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise RankLostError(f"{self._other} is gone: {error}") from error

    def _receive_all(self, size: int, deadline: float | None) -> bytearray:
        message = bytearray(size)
        rest = memoryview(message)
        while rest:
            try:
                count = self._end.recv_into(rest)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
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

    def _wait(self, events: int, deadline: float | None) -> None:
        poll = self._poll(events)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poll.poll(None if left is None else left * 1000):
            raise RankLostError(f"{self._other} hangs: it does not answer in time")


def new_link(other: str) -> tuple[Link, socket.socket]:
    """An end for this process, and one for the process that is named `other`."""
    own, theirs = socket.socketpair()
    return Link(own, other), theirs
