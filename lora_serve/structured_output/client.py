"""`GrammarProcess`: the `GrammarService` whose work another process does.

The process is started with the first request that needs it, and anew when it has died or hangs. The
answers' tokens are kept here, so a new process goes on where the old one was. Nothing is sent to a
process that still starts: it does not read yet.
"""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec

from lora_serve.errors import OverloadedError
from lora_serve.structured_output import wire
from lora_serve.structured_output.at_work import AtWork
from lora_serve.structured_output.service import MaskReply, NewTokens
from lora_serve.structured_output.wire import Advance, Close, GrammarMessage, GrammarSettings, Open
from lora_serve.structured_outputs import NO_GUESS, StructuredOutput

logger = logging.getLogger(__name__)

MAX_WAITING = 1024  # answers that have no first mask yet
START_SECONDS = 600.0  # a machine without time to spare may take minutes
HANG_SECONDS = 10.0  # without any reply; limits of the libraries hold one mask below 0.1
MAX_DEATHS = 2  # of processes that worked on an answer, or may have
_END_SECONDS = 5.0
_KILL_SECONDS = 1.0  # a process that waits for a dead disk may not end before that comes back
_SEND_SECONDS = 1  # a process that takes nothing for so long is ended


@dataclass(slots=True)
class _Answer:
    """One answer. has_begun: this process has given it a mask, so its grammar is compiled.

    owed_since: when the reply was asked for that has not come; 0 if none is owed.
    """

    constraint: StructuredOutput
    allows_eos: bool
    share: str
    token_ids: list[int] = field(default_factory=list)
    has_begun: bool = False
    owed_since: float = 0.0
    num_deaths: int = 0
    may_be_to_blame: bool = False  # for one of them

    @property
    def awaits_grammar(self) -> bool:
        return bool(self.owed_since) and not self.has_begun

    def opening(self, request_id: str) -> Open:
        """What tells a process of this answer."""
        return Open(request_id, self.constraint, self.allows_eos, tuple(self.token_ids), self.share)


class GrammarProcess:
    def __init__(self, settings: GrammarSettings, start_seconds: float = START_SECONDS) -> None:
        """start_seconds: until a process must have loaded its tokenizer."""
        self._settings = settings
        self._start_seconds = start_seconds
        self._answers: dict[str, _Answer] = {}
        self._num_pending = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = False  # the process has loaded its tokenizer
        self._at_work: AtWork | None = None
        # When the process was started, or last compiled a grammar or gave an answer its first mask.
        self._last_progress = 0.0
        self._last_reply = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = wire.reply_decoder()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def open(
        self,
        request_id: str,
        constraint: StructuredOutput,
        *,
        allows_eos: bool = True,
        share: str = "",
    ) -> None:
        num_waiting = sum(answer.awaits_grammar for answer in self._answers.values())
        if num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{num_waiting} requests wait for their grammars, at most {MAX_WAITING} may; retry "
                "later"
            )
        answer = self._answers[request_id] = _Answer(constraint, allows_eos, share)
        self._note_owed(answer)
        if self._connection is None:
            self._start()
        self._send(answer.opening(request_id))

    def advance(self, new_tokens: Sequence[NewTokens]) -> None:
        sent = []
        for new in new_tokens:
            answer = self._answers[new.request_id]
            answer.token_ids += new.token_ids
            self._note_owed(answer)
            # What a guess does to a process must not be an answer's fault.
            is_sent = answer.num_deaths == 0
            sent.append(new if is_sent else msgspec.structs.replace(new, guess=NO_GUESS))
        self._send(Advance(tuple(sent)))

    def close(self, request_id: str) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._num_pending -= bool(answer.owed_since)
            self._send(Close(request_id))

    def take(self, wait_seconds: float = 0.0) -> list[MaskReply]:
        if not self._num_pending:
            return []
        replies: list[MaskReply] = []
        deadline = time.monotonic() + wait_seconds
        try:
            assert self._connection is not None, "replies are owed by no process"
            while self._connection.poll(0.0 if replies else max(0.0, deadline - time.monotonic())):
                came = self._decoder.decode(self._connection.recv_bytes())
                self._last_reply = time.monotonic()
                replies += [reply for reply in came if self._is_news(reply)]
                if not came:
                    self._note_progress()
        except (EOFError, OSError):
            what = "has died" if self._is_ready else "ends while it starts"
            replies += self._start_again(what, is_unavailable=not self._is_ready)
        replies += self._replies_instead_of_late_ones()
        return replies

    def shut_down(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None and not _has_ended(self._process, _END_SECONDS):
            self._kill(self._process)
        if self._at_work is not None:
            self._at_work.close()
        self._connection = self._process = self._at_work = None
        self._is_ready = False

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        if not _has_ended(process, _KILL_SECONDS):
            logger.error("process %d of grammars has been killed, and has not ended", process.pid)

    def _note_owed(self, answer: _Answer) -> None:
        assert not answer.owed_since, "an answer goes on before its mask has come"
        answer.owed_since = time.monotonic()
        self._num_pending += 1

    def _is_news(self, reply: MaskReply) -> bool:
        """Take note of a reply; False for what a process repeats, or owes to no answer any more."""
        answer = self._answers.get(reply.request_id)
        if answer is None or not answer.owed_since or reply.num_tokens != len(answer.token_ids):
            return False
        if not answer.has_begun:
            self._last_progress = time.monotonic()
        answer.has_begun, answer.owed_since = True, 0.0
        self._num_pending -= 1
        return True

    def _note_progress(self) -> None:
        """The process has compiled or refused a grammar, or has loaded its tokenizer."""
        self._last_progress = time.monotonic()
        if self._is_ready:
            return
        self._is_ready = True
        for request_id, answer in self._answers.items():
            if answer.owed_since:
                answer.owed_since = self._last_progress
            self._send(answer.opening(request_id))

    def _replies_instead_of_late_ones(self) -> list[MaskReply]:
        now = time.monotonic()
        first = min((a.owed_since for a in self._answers.values() if a.awaits_grammar), default=now)
        next_one = min(
            (a.owed_since for a in self._answers.values() if a.has_begun and a.owed_since),
            default=now,
        )
        # Masks are computed one after the other, so answers wait for one another's.
        if now - max(next_one, self._last_reply) > HANG_SECONDS:
            return self._start_again("hangs")
        # Grammars are compiled one after the other: the process hangs if none at all gets done.
        if now - max(first, self._last_progress) > self._progress_seconds:
            what = "compiles nothing" if self._is_ready else "does not start"
            return self._start_again(what, is_unavailable=True)
        return []

    @property
    def _progress_seconds(self) -> float:
        """How long the process may take until it has got on."""
        if not self._is_ready:
            return self._start_seconds
        return 2 * self._settings.compile_seconds + HANG_SECONDS  # compiled on trial, then for good

    def _send(self, message: GrammarMessage) -> None:
        """What cannot be sent is sent when another process is ready; `take` finds this one dead."""
        if not self._is_ready:
            return
        assert self._connection is not None, "no process is ready"
        assert self._process is not None, "no process is ready"
        try:
            self._connection.send_bytes(self._encoder.encode(message))
        except OSError:
            logger.debug("the grammars' process is gone, or takes nothing")
            self._process.kill()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        send_seconds = struct.pack("ll", _SEND_SECONDS, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_seconds)
        self._at_work = AtWork()
        numbers = theirs.fileno(), self._at_work.number
        self._process = subprocess.Popen(
            self._command(*numbers),
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(self._encoder.encode(self._settings))
        self._last_progress = time.monotonic()

    def _command(self, socket_number: int, at_work_number: int) -> list[str]:
        return [
            sys.executable,
            "-m",
            "lora_serve.structured_output.process",
            str(socket_number),
            str(at_work_number),
        ]

    def _start_again(self, what: str, *, is_unavailable: bool = False) -> list[MaskReply]:
        """Let a new process follow all answers; refusals for those that waited for several of them.

        is_unavailable: no request is to blame.
        """
        logger.error("the process of grammars %s; starting another", what)
        assert self._process is not None, "no process was started"
        self._kill(self._process)
        self._process = None
        worked_on = self._worked_on()
        self.shut_down()
        now = time.monotonic()
        refusals = []
        for request_id, answer in list(self._answers.items()):
            answer.has_begun = False
            if is_unavailable or request_id in worked_on:
                answer.num_deaths += bool(answer.owed_since)
                answer.may_be_to_blame |= not is_unavailable
            if answer.owed_since:
                answer.owed_since = now
            if answer.num_deaths >= MAX_DEATHS:
                refusals.append(self._refuse(request_id, answer, what))
        if self._answers:
            self._start()
        return refusals

    def _worked_on(self) -> set[str]:
        """The owed answer that the process worked on; where it says none, all that are owed."""
        owed = {request_id for request_id, answer in self._answers.items() if answer.owed_since}
        assert self._at_work is not None, "no process was started"
        return owed & {self._at_work.read()} or owed

    def _refuse(self, request_id: str, answer: _Answer, what: str) -> MaskReply:
        del self._answers[request_id]
        self._num_pending -= 1
        error = (
            "following the grammar of this request ended the process that does it"
            if answer.may_be_to_blame
            else f"no mask came for this request: the process of grammars {what} (tried "
            f"{MAX_DEATHS} times); see the server's log, and retry later"
        )
        return MaskReply(
            request_id,
            len(answer.token_ids),
            error=error,
            is_fault=answer.may_be_to_blame,
            is_unavailable=not answer.may_be_to_blame,
        )


def _has_ended(process: subprocess.Popen[bytes], wait_seconds: float) -> bool:
    try:
        process.wait(wait_seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
