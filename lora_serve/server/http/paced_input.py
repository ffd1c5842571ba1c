"""Hands what clients send to the parsers in small pieces, and lets the event loop turn in between.

A parser runs on the event loop and makes an object of each head and each chunk that it finds, so
what comes in one read could keep the loop for a second. Each piece ends with the first head in it:
at most two requests of a piece are made into objects, and none while the parser has paused reading,
as it does once a request waits for another's answer. Of a connection no more is kept unparsed than
one read brings (256 KiB), because reading is paused meanwhile. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_PIECE_BYTES = 4096
SECONDS_AT_A_TIME = 0.001  # that parsing may take of one turn of the loop, but for a last piece
END_OF_HEAD = re.compile(rb"\n\r?\n")


class ParsingTurns:
    """Parses for all connections that have more than one piece: a piece each, in turn."""

    def __init__(self) -> None:
        self._waiting: deque[PacedInput] = deque()
        self._is_scheduled = False

    def add(self, waiting: PacedInput) -> None:
        self._waiting.append(waiting)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._parse)

    def _parse(self) -> None:
        self._is_scheduled = False
        end = time.monotonic() + SECONDS_AT_A_TIME
        try:
            while self._waiting:
                self._waiting.popleft().take_turn()
                if time.monotonic() >= end:
                    return
        finally:
            self._schedule()


class PacedInput:
    """What one connection has received, and the transport that its parser sees.

    The parser's pauses stop its pieces, too. All else is the real transport's.
    """

    def __init__(
        self, transport: asyncio.Transport, parse: Callable[[bytes], None], turns: ParsingTurns
    ) -> None:
        self._transport = transport
        self._parse = parse
        self._turns = turns
        self._unparsed = bytearray()
        self._is_paused = False  # by the parser
        self._is_waiting = False  # for its turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def receive(self, data: bytes) -> None:
        """Parse a first piece at once, so that what is small waits for no turn.

        And with a head a small body behind it: else each request would wait for others' tokens
        once more.
        """
        is_first = not self._unparsed
        self._unparsed += data
        if is_first and not self._is_paused:
            self._parse_piece()
            if self._is_small_rest():
                self._parse_piece()
        self._go_on()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._go_on()

    def take_turn(self) -> None:
        self._is_waiting = False
        if not (self._is_paused or self._transport.is_closing()):
            self._parse_piece()
        self._go_on()

    def drop(self) -> None:
        """Parse nothing more: the connection is lost."""
        self._unparsed.clear()

    def _go_on(self) -> None:
        if self._transport.is_closing():
            self.drop()
        elif self._unparsed:
            self._transport.pause_reading()
            if not (self._is_paused or self._is_waiting):
                self._is_waiting = True
                self._turns.add(self)
        elif not self._is_paused:
            self._transport.resume_reading()

    def _is_small_rest(self) -> bool:
        """Whether what is left is a piece that ends no further head."""
        is_stopped = self._is_paused or self._transport.is_closing()
        is_small = 0 < len(self._unparsed) <= MAX_PIECE_BYTES
        return is_small and not is_stopped and not END_OF_HEAD.search(self._unparsed)

    def _parse_piece(self) -> None:
        head = END_OF_HEAD.search(self._unparsed, 0, MAX_PIECE_BYTES)
        size = head.end() if head else MAX_PIECE_BYTES
        piece = bytes(self._unparsed[:size])
        del self._unparsed[:size]
        if piece:
            self._parse(piece)
