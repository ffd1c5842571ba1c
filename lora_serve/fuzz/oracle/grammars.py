"""Toy grammars: what may follow is a hash of the constraint and of all tokens of the answer so far.

So a mask of another request, of an earlier step or of a forgotten answer shows in the next token.
A constraint is a "regex" of the text "SEED LENGTH", or "SEED LENGTH FORCED": the answer has at most
LENGTH tokens, of which FORCED percent are the only ones that are allowed in their places.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_serve.bitmask import bitmask_of
from lora_serve.structured_output.service import MaskReply, NewTokens
from lora_serve.structured_outputs import NO_GUESS, Guess, MaskedDrafts, StructuredOutput

NUM_ALLOWED = 20


def toy_constraint(seed: int, length: int, forced: int = 0) -> StructuredOutput:
    return StructuredOutput("regex", f"{seed} {length}" + f" {forced}" * bool(forced))


def allowed_next(
    constraint: StructuredOutput, token_ids: Sequence[int], vocab_size: int, eos: int
) -> list[int] | None:
    """The tokens that may follow, ascending; None where the answer is complete."""
    _, length, *forced = map(int, constraint.text.split())
    if len(token_ids) >= length:
        return None
    rng = random.Random(f"{constraint.text} {list(token_ids)}")
    if forced and rng.randrange(100) < forced[0]:
        return [rng.randrange(8, vocab_size)]
    allowed = set(rng.sample(range(8, vocab_size), NUM_ALLOWED))
    return sorted(allowed | ({eos} if rng.random() < 0.2 else set()))


@dataclass(slots=True)
class _ToyAnswer:
    constraint: StructuredOutput
    token_ids: list[int] = field(default_factory=list)
    guess: Guess = NO_GUESS
    num_looks_left: int = 0  # until the reply that is owed is there
    is_owed: bool = True


class OracleGrammars:
    """A `GrammarService` whose replies come some looks late, each another number of them."""

    def __init__(self, vocab_size: int, eos: int, max_delay: int = 0, max_drafts: int = 0) -> None:
        self._vocab_size = vocab_size
        self._eos = eos
        self._max_delay = max_delay
        self._max_drafts = max_drafts
        self._rng = random.Random(max_delay)
        self._answers: dict[str, _ToyAnswer] = {}

    @property
    def num_pending(self) -> int:
        return sum(answer.is_owed for answer in self._answers.values())

    def open(
        self,
        request_id: str,
        constraint: StructuredOutput,
        *,
        allows_eos: bool = True,
        share: str = "",
    ) -> None:
        assert allows_eos, "toy grammars always let answers end"
        assert request_id not in self._answers, f"{request_id} was not closed"
        self._answers[request_id] = _ToyAnswer(constraint, num_looks_left=self._delay())

    def advance(self, new_tokens: Sequence[NewTokens]) -> None:
        for new in new_tokens:
            answer = self._answers[new.request_id]
            assert not answer.is_owed, f"{new.request_id} goes on before its mask has come"
            for token_id in new.token_ids:
                assert token_id in (self._allowed(answer) or ()), f"{token_id} was not allowed"
                answer.token_ids.append(token_id)
            answer.guess = new.guess
            answer.is_owed, answer.num_looks_left = True, self._delay()

    def close(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def take(self, wait_seconds: float = 0.0) -> list[MaskReply]:
        replies = []
        for request_id, answer in self._answers.items():
            if answer.is_owed and answer.num_looks_left == 0:
                answer.is_owed = False
                replies.append(self._reply(request_id, answer))
        if not replies:  # a step looks until there is nothing
            for answer in self._answers.values():
                answer.num_looks_left = max(0, answer.num_looks_left - 1)
        return replies

    def shut_down(self) -> None:
        pass

    def _reply(self, request_id: str, answer: _ToyAnswer) -> MaskReply:
        allowed = self._allowed(answer)
        if allowed is None:
            return MaskReply(request_id, len(answer.token_ids), is_finished=True)
        mask = bitmask_of(allowed, self._vocab_size)
        return MaskReply(request_id, len(answer.token_ids), mask, drafts=self._drafts(answer))

    def _drafts(self, answer: _ToyAnswer) -> MaskedDrafts | None:
        """What is forced, or guessed and allowed, as far as something may follow it."""
        ahead, num_known = _ToyAnswer(answer.constraint, answer.token_ids[:]), len(answer.token_ids)
        guess, num_left = answer.guess.token_ids, answer.guess.most
        masks: list[bytes] = []
        are_forced: list[bool] = []
        while len(masks) < self._max_drafts:
            allowed, place = self._allowed(ahead) or [], len(masks)
            guessed = guess[place] if place < len(guess) else self._eos
            is_forced = len(allowed) == 1 and allowed[0] != self._eos
            if is_forced and guessed != allowed[0]:
                guess = ()
            num_left -= not is_forced
            if not is_forced and (num_left < 0 or not self._permits(guessed, allowed)):
                break
            ahead.token_ids.append(allowed[0] if is_forced else guessed)
            if not (behind := self._allowed(ahead)):
                del ahead.token_ids[-1]
                break
            are_forced.append(is_forced)
            masks.append(bitmask_of(behind, self._vocab_size))
        if not masks:
            return None
        kept = [
            b"" if forced else mask for mask, forced in zip(masks, are_forced[1:], strict=False)
        ]
        drafts = tuple(ahead.token_ids[num_known:])
        return MaskedDrafts(drafts, (*kept, masks[-1]), are_forced[0])

    def _permits(self, token_id: int, allowed: Sequence[int]) -> bool:
        """Whether a guess may go on with a token."""
        return token_id in allowed and token_id != self._eos

    def _allowed(self, answer: _ToyAnswer) -> list[int] | None:
        return allowed_next(answer.constraint, answer.token_ids, self._vocab_size, self._eos)

    def _delay(self) -> int:
        return self._rng.randrange(self._max_delay + 1)
