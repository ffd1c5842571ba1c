"""All answers that follow a grammar at present, and the grammars that were compiled lately.

Computes what it is asked for at once; knows no process, and no time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_serve.bitmask import bitmask_of_one
from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import Grammar, Matcher, refusal
from lora_serve.structured_output.guesses import FollowedGuess
from lora_serve.structured_output.outlook import Outlooks
from lora_serve.structured_output.service import MaskReply
from lora_serve.structured_output.wire import Open
from lora_serve.structured_outputs import Guess, MaskedDrafts, StructuredOutput

Outlook = bytes | InvalidRequestError | None  # a mask, or why there is none; None: nothing follows


class GrammarCache:
    """Grammars by their constraints, the least recently used first. Bounded in number and bytes."""

    def __init__(self, max_grammars: int, max_bytes: int) -> None:
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._entries: OrderedDict[StructuredOutput, tuple[Grammar, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, constraint: StructuredOutput) -> Grammar | None:
        entry = self._entries.get(constraint)
        if entry is None:
            return None
        self._entries.move_to_end(constraint)
        return entry[0]

    def put(self, constraint: StructuredOutput, grammar: Grammar, num_bytes: int) -> None:
        """Keep a grammar for later answers, at the cost of others."""
        self.discard(constraint)
        self._entries[constraint] = grammar, num_bytes
        self._num_bytes += num_bytes
        while len(self._entries) > self._max_grammars or self._num_bytes > self._max_bytes:
            self.discard(next(iter(self._entries)))

    def discard(self, constraint: StructuredOutput) -> None:
        _, num_bytes = self._entries.pop(constraint, (None, 0))
        self._num_bytes -= num_bytes


@dataclass(slots=True)
class _Answer:
    """is_alone: no other answer has used its grammar.

    ahead: forced tokens that the matcher has, and the answer has not yet.
    outlook: what may follow all that the matcher has; of no meaning where `is_known` is not set.
    """

    constraint: StructuredOutput
    matcher: Matcher
    allows_eos: bool
    is_alone: bool
    token_ids: list[int] = field(default_factory=list)
    ahead: deque[int] = field(default_factory=deque)
    outlook: Outlook = None
    is_known: bool = False

    def accept(self, token_id: int) -> None:
        """Go on with a token; a forced one is no news to the matcher."""
        if not self.ahead:
            self.is_known = False
            self.matcher.accept(token_id)
        elif token_id != self.ahead.popleft():
            raise refusal(f"it does not allow token {token_id} here")


class Answers:
    """The matchers of all answers, by request."""

    def __init__(
        self,
        cache: GrammarCache,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_drafts: int = 0,
    ) -> None:
        """vocab_size, eos_token_ids: as of `Outlooks`.

        max_drafts: tokens, forced or guessed, that are looked at ahead of each answer.
        """
        self._cache = cache
        self._outlooks = Outlooks(vocab_size, eos_token_ids)
        self._max_drafts = max_drafts
        self._answers: dict[str, _Answer] = {}

    def begin(
        self,
        request_id: str,
        constraint: StructuredOutput,
        grammar: Grammar,
        token_ids: Sequence[int] = (),
        *,
        allows_eos: bool = True,
        is_alone: bool = False,
    ) -> MaskReply | Open:
        """Begin an answer that has these tokens already. Returns what `advance` does.

        is_alone: the grammar was compiled for this answer, and is not in the cache.
        """
        self._answers[request_id] = _Answer(constraint, grammar.matcher(), allows_eos, is_alone)
        return self.advance(request_id, token_ids)

    def constraint_of(self, request_id: str) -> StructuredOutput:
        return self._answers[request_id].constraint

    def advance(self, request_id: str, token_ids: Sequence[int]) -> MaskReply | Open:
        """What may follow these tokens; or how to begin the answer again, with a new grammar.

        What answers of one grammar find out of it they share, guesses too, and so its limits: only
        where it fails at an answer that has one alone, that is refused.
        """
        answer = self._answers[request_id]
        answer.token_ids += token_ids
        num_tokens = len(answer.token_ids)
        try:
            self._go_on(answer, token_ids)
        except InvalidRequestError as error:
            self._cache.discard(answer.constraint)
            self.end(request_id)
            if answer.is_alone:
                return MaskReply(request_id, num_tokens, error=str(error))
            return Open(request_id, answer.constraint, answer.allows_eos, (*answer.token_ids,))
        mask = answer.outlook if isinstance(answer.outlook, bytes) else None
        if not answer.ahead:
            return MaskReply(request_id, num_tokens, mask, is_finished=mask is None)
        return MaskReply(
            request_id,
            num_tokens,
            bitmask_of_one(answer.ahead[0]),
            drafts=_forced_drafts(answer.ahead, mask),
        )

    def follow(self, reply: MaskReply, guess: Guess) -> FollowedGuess | None:
        """Begin to look how far a guess is permitted; None if it is not.

        A guess uses the limits of its grammar, so none is followed where the answer has one alone.
        reply: the last one of `advance`.
        """
        answer = self._answers.get(reply.request_id)
        if answer is None or answer.is_alone or not isinstance(answer.outlook, bytes):
            return None
        return FollowedGuess(
            reply,
            guess,
            answer.matcher.fork(),
            self._outlooks,
            allows_eos=answer.allows_eos,
            max_drafts=self._max_drafts,
        )

    def end(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def _go_on(self, answer: _Answer, token_ids: Sequence[int]) -> None:
        """Take in some more tokens, and let the matcher go on by those that are forced then."""
        for token_id in token_ids:
            answer.accept(token_id)
        if not answer.is_known:
            answer.outlook, answer.is_known = self._outlook(answer), True
        if isinstance(answer.outlook, InvalidRequestError) and not answer.ahead:
            raise answer.outlook
        while len(answer.ahead) < self._max_drafts and isinstance(answer.outlook, bytes):
            forced = self._outlooks.forced(answer.outlook)
            if forced is None:
                return
            answer.ahead.append(forced)
            try:
                answer.matcher.accept(forced)
                answer.outlook = self._outlook(answer)
            except InvalidRequestError as error:
                answer.outlook = error  # the answer may end before it comes there

    def _outlook(self, answer: _Answer) -> bytes | None:
        return self._outlooks.behind(answer.matcher, allows_eos=answer.allows_eos)


def _forced_drafts(token_ids: Sequence[int], mask: bytes | None) -> MaskedDrafts | None:
    """Forced tokens as drafts; all but the last where what may follow that is not known."""
    if mask is None:
        *token_ids, last = token_ids
        mask = bitmask_of_one(last)
    if not token_ids:
        return None
    return MaskedDrafts(tuple(token_ids), (*(b"",) * (len(token_ids) - 1), mask))
