"""`GrammarProcess`: the `GrammarService` whose work another process does.

The process is started with the first request that needs it, and anew when it has died or hangs. The
answers' tokens are kept here, so a new process goes on where the old one was.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec

from lora_serve.errors import OverloadedError
from lora_serve.structured_output import wire
from lora_serve.structured_output.service import MaskReply
from lora_serve.structured_output.wire import Advance, Close, GrammarMessage, GrammarSettings, Open
from lora_serve.structured_outputs import StructuredOutput

logger = logging.getLogger(__name__)

MAX_WAITING = 1024  # answers that have no first mask yet
HANG_SECONDS = 10.0  # for one mask; limits of the libraries hold it below 0.1
MAX_DEATHS = 2  # of processes that owed an answer a mask
_END_SECONDS = 5.0


@dataclass(slots=True)
class _Answer:
    """One answer. owed_since: when the reply was asked for that has not come; 0 if none is owed."""

    constraint: StructuredOutput
    allows_eos: bool
    token_ids: list[int] = field(default_factory=list)
    has_begun: bool = False
    owed_since: float = 0.0
    num_deaths: int = 0


class GrammarProcess:
    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        self._answers: dict[str, _Answer] = {}
        self._num_pending = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = wire.reply_decoder()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def open(
        self, request_id: str, constraint: StructuredOutput, *, allows_eos: bool = True
    ) -> None:
        num_waiting = sum(not answer.has_begun for answer in self._answers.values())
        if num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{num_waiting} requests wait for their grammars, at most {MAX_WAITING} may; retry "
                "later"
            )
        answer = self._answers[request_id] = _Answer(constraint, allows_eos)
        self._note_owed(answer)
        self._send(Open(request_id, constraint, allows_eos))

    def advance(self, new_tokens: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        for request_id, token_ids in new_tokens:
            answer = self._answers[request_id]
            answer.token_ids += token_ids
            self._note_owed(answer)
        self._send(Advance(tuple(new_tokens)))

    def close(self, request_id: str) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._num_pending -= bool(answer.owed_since)
            self._send(Close(request_id))

    def take(self, wait_seconds: float = 0.0) -> list[MaskReply]:
        if not self._num_pending:
            return []
        replies: list[MaskReply] = []
        try:
            assert self._connection is not None, "replies are owed by no process"
            while self._connection.poll(0.0 if replies else wait_seconds):
                came = self._decoder.decode(self._connection.recv_bytes())
                replies += [reply for reply in came if self._is_news(reply)]
        except (EOFError, OSError):
            replies += self._start_again("has died")
        if self._hangs():
            replies += self._start_again("hangs")
        return replies

    def shut_down(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._connection = self._process = None

    def _note_owed(self, answer: _Answer) -> None:
        assert not answer.owed_since, "an answer goes on before its mask has come"
        answer.owed_since = time.monotonic()
        self._num_pending += 1

    def _is_news(self, reply: MaskReply) -> bool:
        """Take note of a reply; False for what a process repeats, or owes to no answer any more."""
        answer = self._answers.get(reply.request_id)
        if answer is None or not answer.owed_since or reply.num_tokens != len(answer.token_ids):
            return False
        answer.has_begun, answer.owed_since = True, 0.0
        self._num_pending -= 1
        return True

    def _hangs(self) -> bool:
        oldest = min(
            (a.owed_since for a in self._answers.values() if a.has_begun and a.owed_since),
            default=None,
        )
        return oldest is not None and time.monotonic() - oldest > HANG_SECONDS

    def _send(self, message: GrammarMessage) -> None:
        """What cannot be sent is sent by `_start_again`, when `take` finds the process dead."""
        if self._connection is None:
            self._start()
        assert self._connection is not None, "the process was just started"
        try:
            self._connection.send_bytes(self._encoder.encode(message))
        except OSError:
            logger.debug("the grammars' process is gone")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lora_serve.structured_output.process", str(number)],
            pass_fds=(number,),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(self._encoder.encode(self._settings))

    def _start_again(self, what: str) -> list[MaskReply]:
        """Let a new process follow all answers; refusals for those that ended several of them."""
        logger.error("the process of grammars %s; starting another", what)
        assert self._process is not None, "no process was started"
        self._process.kill()
        self.shut_down()
        refusals = []
        for request_id, answer in list(self._answers.items()):
            if answer.owed_since:
                answer.num_deaths += 1
                answer.owed_since = time.monotonic()
            if answer.num_deaths >= MAX_DEATHS:
                refusals.append(self._refuse(request_id, answer))
            else:
                self._send(
                    Open(request_id, answer.constraint, answer.allows_eos, tuple(answer.token_ids))
                )
        return refusals

    def _refuse(self, request_id: str, answer: _Answer) -> MaskReply:
        del self._answers[request_id]
        self._num_pending -= 1
        return MaskReply(
            request_id,
            len(answer.token_ids),
            error="following the grammar of this request ended the process that does it",
            is_fault=True,
        )
