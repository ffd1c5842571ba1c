"""What the threads that watch ranks tell the API process, and the log, of late and lost ones.

An engine that has lost a rank is a dead engine. The API process is told why, and of an engine that
was ready the log, too.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import NoReturn

import zmq

from lora_serve.engine import wire
from lora_serve.errors import RankLostError
from lora_serve.messages import EngineEnds, EngineReady, EngineReply, RanksLate

logger = logging.getLogger(__name__)

EXIT_CODE_OF_LOST_RANK = 71
_SEND_MS = 2000


class RankNews:
    """`late` and `lost` may be called in any thread."""

    def __init__(self, reply_address: str) -> None:
        self._address = reply_address
        self._is_ready = False
        self._ending = threading.Lock()  # taken once, by the first to find that a rank is lost

    def note_ready(self) -> None:
        self._is_ready = True

    def late(self, ranks: Sequence[int]) -> None:
        self._send(RanksLate(tuple(ranks)))

    def lost(self, error: RankLostError) -> NoReturn:
        """End this process."""
        self._ending.acquire()
        if self._is_ready:
            logger.critical("the engine ends: %s", error)
            logging.shutdown()  # wait for that line
            self._send(EngineEnds(str(error)))
        else:
            self._send(EngineReady(error=wire.error_info(error)))
        os._exit(EXIT_CODE_OF_LOST_RANK)

    def _send(self, reply: EngineReply) -> None:
        """Send by a socket of its own: the engine's is for its own thread."""
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(self._address)
        socket.send(wire.encoder().encode(reply))
        context.destroy(linger=_SEND_MS)
