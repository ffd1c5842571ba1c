"""A zmq socket's messages, in a task of the event loop.

zmq's own sockets for asyncio make futures for each message; here it costs a call, and all that have
come are taken at once.
"""

from __future__ import annotations

import asyncio

import zmq

from lora_serve.engine.frontend.mailbox import Mailbox


class MessageReader:
    """Reads a socket that nothing else reads. `open`, then `next`, by one task; `close` at last."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._mail: Mailbox[bytes | None] = Mailbox()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begin to take messages in; to be called once the socket is bound or connected."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._take_in)
        self._take_in()  # the descriptor tells of what comes from now on

    async def next(self) -> bytes | None:
        """The next message; None once there is none and none will come."""
        message = await self._mail.get()
        if message is None:
            self._mail.put(None)  # whoever asks again is told again
        return message

    def end(self) -> None:
        """Say that who sends the messages is gone: those that are here are the last."""
        self.close()
        self._mail.put(None)

    def close(self) -> None:
        """Leave the event loop, before the socket is closed."""
        if self._loop is not None:
            self._take_in()
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None

    def _take_in(self) -> None:
        # Until it is empty: the descriptor tells of no message twice.
        try:
            while True:
                self._mail.put(self._socket.recv(zmq.DONTWAIT))
        except zmq.Again:
            return
