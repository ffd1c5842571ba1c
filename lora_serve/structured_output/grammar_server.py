"""The work of the grammars' process: constraints to compile, answers to follow, masks to compute.

One thread owns it all and takes in what comes through `inbox`. Constraints are compiled in others,
after a process of their own could do it within its limits (`trial.py`).
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import msgspec

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.answers import Answers, GrammarCache
from lora_serve.structured_output.at_work import AtWork
from lora_serve.structured_output.backend import Backend, Grammar
from lora_serve.structured_output.compile_queue import CompileQueue
from lora_serve.structured_output.guesses import GuessQueue
from lora_serve.structured_output.service import MaskReply, NewTokens
from lora_serve.structured_output.trial import Outcome, TrialProcess
from lora_serve.structured_output.turns import Turns
from lora_serve.structured_output.wire import Advance, Close, Open
from lora_serve.structured_outputs import StructuredOutput

logger = logging.getLogger(__name__)

SLOW_SECONDS = 0.001  # what is ready is sent before another mask is computed
GUESS_SECONDS = 0.001  # in which guesses are followed, once all masks that are owed are there
_MAX_REFUSALS = 64


class Compiled(msgspec.Struct, frozen=True):
    """What became of a constraint: a grammar, or an outcome that says why there is none."""

    constraint: StructuredOutput
    outcome: Outcome
    grammar: Grammar | None = None


class CompiledAlone(msgspec.Struct, frozen=True):
    """A grammar for one answer, which other answers' use of the shared one may have failed."""

    request_id: str
    grammar: Grammar | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Begin:
    message: Open
    grammar: Grammar
    is_alone: bool = False


_Task = _Begin | NewTokens


_Message = Open | Advance | Close | Compiled | CompiledAlone
Inbox = queue.SimpleQueue[_Message | None]  # None: the engine is gone


class GrammarServer:
    """Takes in what comes through `inbox`, and computes one mask after the other, by `Turns`."""

    def __init__(
        self,
        backend: Backend,
        trials: Sequence[TrialProcess],
        answers: Answers,
        cache: GrammarCache,
        at_work: AtWork,
    ) -> None:
        """trials: as many constraints are compiled at once."""
        self.inbox: Inbox = queue.SimpleQueue()
        self._backend = backend
        self._idle_trials = list(trials)
        self._busy_trials: dict[StructuredOutput, TrialProcess] = {}
        self._answers = answers
        self._cache = cache
        self._at_work = at_work
        self._turns: Turns[_Task] = Turns()
        self._guesses = GuessQueue(at_work)
        self._waiting = CompileQueue()
        self._begun_again: dict[str, Open] = {}  # answers that wait for grammars of their own
        self._refusals: dict[StructuredOutput, str] = {}  # oldest first
        self._compilers = ThreadPoolExecutor(len(trials), "grammar-compiler")

    def run(self, connection: Connection) -> None:
        encoder = msgspec.msgpack.Encoder()
        connection.send_bytes(encoder.encode([]))  # the tokenizer is loaded
        replies: list[MaskReply] = []
        last = time.monotonic()
        while True:
            while not (self._turns or self._guesses) or not self.inbox.empty():
                message = self.inbox.get()
                if message is None:
                    return
                replies += self._take_in(message)
                if isinstance(message, Compiled | CompiledAlone):
                    connection.send_bytes(encoder.encode([]))
                if not self._turns and replies:
                    break
            replies += self._work()
            if not self._turns or time.monotonic() - last > SLOW_SECONDS:
                connection.send_bytes(encoder.encode(replies))
                replies, last = [], time.monotonic()

    def _work(self) -> list[MaskReply]:
        """Compute a mask that is owed, or follow guesses where none is; returns what is ready."""
        replies = []
        if self._turns:
            task = self._turns.take()
            reply = self._compute(task)
            if reply is not None and not self._begin_guess(task, reply):
                replies.append(reply)
        if not self._turns:
            return replies + self._guesses.follow(self.inbox.empty, GUESS_SECONDS)
        if self._guesses.waited_seconds > SLOW_SECONDS:
            return replies + self._guesses.take()
        return replies

    def _take_in(self, message: _Message) -> list[MaskReply]:
        """Give what is asked for its turn; refusals that need none."""
        replies: list[MaskReply] = []
        match message:
            case Open():
                replies = self._open(message)
            case Advance():
                for new in message.new_tokens:
                    if not self._is_put_off(new.request_id, new.token_ids):
                        constraint = self._answers.constraint_of(new.request_id)
                        self._turns.put(new.request_id, constraint, new, is_first=False)
            case Close():
                self._answers.end(message.request_id)
                self._turns.discard(message.request_id)
                self._guesses.close(message.request_id)
                self._begun_again.pop(message.request_id, None)
                if (unwanted := self._waiting.discard(message.request_id)) is not None:
                    self._busy_trials[unwanted].cancel()
            case Compiled():
                replies = self._note_compiled(message)
            case CompiledAlone():
                replies = self._note_compiled_alone(message)
        self._compile_next()
        return replies

    def _compute(self, task: _Task) -> MaskReply | None:
        """A reply; None where the answer begins again before it has one."""
        if isinstance(task, _Begin):
            reply = self._begin(task)
        else:
            self._at_work.note(task.request_id)
            reply = self._answers.advance(task.request_id, task.token_ids)
            self._at_work.note("")
        if isinstance(reply, MaskReply):
            return reply
        self._begun_again[reply.request_id] = reply
        self._compilers.submit(self._compile_alone, reply)
        return None

    def _begin_guess(self, task: _Task, reply: MaskReply) -> bool:
        """Let the guess be followed that came with the tokens, if any can be; then it replies."""
        if not isinstance(task, NewTokens) or not task.guess.most:
            return False
        followed = self._answers.follow(reply, task.guess)
        return followed is not None and self._guesses.put(followed)

    def _open(self, message: Open) -> list[MaskReply]:
        constraint = message.constraint
        grammar, error = self._cache.get(constraint), self._refusals.get(constraint, "")
        if grammar is not None or error:
            return self._settle(message, grammar, error)
        self._waiting.put(message)
        return []

    def _is_put_off(self, request_id: str, token_ids: tuple[int, ...]) -> bool:
        """Whether the answer has not begun yet; it then gets these tokens when it does.

        So it is where an earlier process had the grammar.
        """
        task = self._turns.get(request_id)
        if isinstance(task, _Begin):
            self._turns.discard(request_id)
            self._put(replace(task, message=_with_tokens(task.message, token_ids)))
            return True
        if (again := self._begun_again.get(request_id)) is not None:
            self._begun_again[request_id] = _with_tokens(again, token_ids)
            return True
        if (opened := self._waiting.get(request_id)) is not None:
            self._waiting.put(_with_tokens(opened, token_ids))
        return opened is not None

    def _settle(self, message: Open, grammar: Grammar | None, error: str) -> list[MaskReply]:
        """Refuse an answer, or give its first mask its turn."""
        if grammar is None:
            return [MaskReply(message.request_id, len(message.token_ids), error=error)]
        self._put(_Begin(message, grammar))
        return []

    def _put(self, task: _Begin) -> None:
        self._turns.put(task.message.request_id, task.message.constraint, task, is_first=True)

    def _begin(self, task: _Begin) -> MaskReply | Open:
        message = task.message
        self._at_work.note(message.request_id)
        reply = self._answers.begin(
            message.request_id,
            message.constraint,
            task.grammar,
            message.token_ids,
            allows_eos=message.allows_eos,
            is_alone=task.is_alone,
        )
        self._at_work.note("")
        return reply

    def _compile_next(self) -> None:
        """Let idle trials compile what waits."""
        while self._idle_trials and (constraint := self._waiting.take()) is not None:
            trial = self._busy_trials[constraint] = self._idle_trials.pop()
            trial.begin(constraint)
            self._compilers.submit(self._compile, constraint, trial)

    def _note_compiled(self, compiled: Compiled) -> list[MaskReply]:
        constraint, outcome = compiled.constraint, compiled.outcome
        self._idle_trials.append(self._busy_trials.pop(constraint))
        if outcome.is_cancelled:
            self._waiting.put_back(constraint)
            return []
        if compiled.grammar is not None:
            self._cache.put(constraint, compiled.grammar, outcome.num_bytes)
        elif outcome.error:
            self._refusals[constraint] = outcome.error
            if len(self._refusals) > _MAX_REFUSALS:
                del self._refusals[next(iter(self._refusals))]
        messages = self._waiting.remove(constraint)
        if outcome.failure:
            return [_unavailable(message, outcome.failure) for message in messages]
        replies: list[MaskReply] = []
        for message in messages:
            replies += self._settle(message, compiled.grammar, outcome.error)
        return replies

    def _note_compiled_alone(self, compiled: CompiledAlone) -> list[MaskReply]:
        message = self._begun_again.pop(compiled.request_id, None)
        if message is None:
            return []  # it was closed
        if compiled.grammar is None:
            return self._settle(message, None, compiled.error)
        self._put(_Begin(message, compiled.grammar, is_alone=True))
        return []

    def _compile_alone(self, message: Open) -> None:
        """Compile in a thread what was compiled here before, so without a trial."""
        if message.request_id not in self._begun_again:
            return  # it was closed
        grammar, error = None, ""
        try:
            grammar = self._backend.compile(message.constraint)
        except BaseException as caught:  # requests must not wait for ever
            error = str(caught) if isinstance(caught, InvalidRequestError) else f"{caught!r}"
        self.inbox.put(CompiledAlone(message.request_id, grammar, error))

    def _compile(self, constraint: StructuredOutput, trial: TrialProcess) -> None:
        """Compile in a thread what another process could compile within its limits."""
        outcome, grammar = trial.outcome(), None
        try:
            if outcome.failure:
                logger.warning("trying a %s again: %s", constraint.kind, outcome.failure)
                trial.begin(constraint)
                outcome = trial.outcome()
            if outcome.is_sound:
                grammar = self._backend.compile(constraint)
        except InvalidRequestError as error:
            outcome = Outcome(error=str(error))
        except BaseException as error:  # requests must not wait for ever
            outcome = Outcome(failure=f"{error!r}")
        self.inbox.put(Compiled(constraint, outcome, grammar))


def _with_tokens(message: Open, token_ids: tuple[int, ...]) -> Open:
    return msgspec.structs.replace(message, token_ids=message.token_ids + token_ids)


def _unavailable(message: Open, failure: str) -> MaskReply:
    """Refuse an answer for now: nothing is known of its constraint."""
    error = f"structured_outputs: the {message.constraint.kind} was not compiled, as {failure}"
    return MaskReply(
        message.request_id,
        len(message.token_ids),
        error=f"{error} (tried twice); retry later",
        is_unavailable=True,
    )
