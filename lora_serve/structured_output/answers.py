"""All answers that follow a grammar at present, and the grammars that were compiled lately.

Computes what it is asked for at once; knows no process, and no time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import Grammar, Matcher, refusal
from lora_serve.structured_output.service import MaskReply
from lora_serve.structured_outputs import ForcedTokens, StructuredOutput, bitmask_of_one

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
    """ahead: forced tokens that the matcher has, and the answer has not yet.

    outlook: what may follow all that the matcher has; of no meaning where `is_known` is not set.
    """

    constraint: StructuredOutput
    matcher: Matcher
    allows_eos: bool
    num_tokens: int = 0
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
        max_forced_tokens: int = 0,
    ) -> None:
        """vocab_size: of the model's logits; a tokenizer may know more tokens.

        max_forced_tokens: that are looked for ahead of each answer.
        """
        self._cache = cache
        self._vocab_size = vocab_size
        self._eos_token_ids = [i for i in eos_token_ids if i < vocab_size]
        self._max_forced_tokens = max_forced_tokens
        self._answers: dict[str, _Answer] = {}

    def begin(
        self,
        request_id: str,
        constraint: StructuredOutput,
        grammar: Grammar,
        token_ids: Sequence[int] = (),
        *,
        allows_eos: bool = True,
    ) -> MaskReply:
        """Begin an answer that has these tokens already."""
        self._answers[request_id] = _Answer(constraint, grammar.matcher(), allows_eos)
        return self.advance(request_id, token_ids)

    def constraint_of(self, request_id: str) -> StructuredOutput:
        return self._answers[request_id].constraint

    def advance(self, request_id: str, token_ids: Sequence[int]) -> MaskReply:
        answer = self._answers[request_id]
        answer.num_tokens += len(token_ids)
        try:
            self._go_on(answer, token_ids)
        except InvalidRequestError as error:
            # Earlier answers may have grown what all of this grammar share: the next one is new.
            self._cache.discard(answer.constraint)
            self.end(request_id)
            return MaskReply(request_id, answer.num_tokens, error=str(error))
        mask = answer.outlook if isinstance(answer.outlook, bytes) else None
        if not answer.ahead:
            return MaskReply(request_id, answer.num_tokens, mask, is_finished=mask is None)
        return MaskReply(
            request_id,
            answer.num_tokens,
            bitmask_of_one(answer.ahead[0]),
            forced=ForcedTokens.of(answer.ahead, mask),
        )

    def end(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def _go_on(self, answer: _Answer, token_ids: Sequence[int]) -> None:
        """Take in some more tokens, and let the matcher go on by those that are forced then."""
        for token_id in token_ids:
            answer.accept(token_id)
        if not answer.is_known:
            answer.outlook, answer.is_known = self._next_mask(answer), True
        if isinstance(answer.outlook, InvalidRequestError) and not answer.ahead:
            raise answer.outlook
        while len(answer.ahead) < self._max_forced_tokens:
            forced = self._forced(answer.outlook)
            if forced is None:
                return
            answer.ahead.append(forced)
            try:
                answer.matcher.accept(forced)
                answer.outlook = self._next_mask(answer)
            except InvalidRequestError as error:
                answer.outlook = error  # the answer may end before it comes there

    def _forced(self, outlook: Outlook) -> int | None:
        """The one token that may follow, if there is just one and it does not end the answer."""
        if not isinstance(outlook, bytes):
            return None
        number = int.from_bytes(outlook, "little")
        token_id = number.bit_length() - 1
        return token_id if number.bit_count() == 1 and token_id not in self._eos_token_ids else None

    def _next_mask(self, answer: _Answer) -> bytes | None:
        """What may follow what the matcher has; None if nothing may."""
        if answer.matcher.is_finished:
            return None
        mask = answer.matcher.bitmask()
        if answer.allows_eos and 8 * len(mask) <= self._vocab_size:
            return mask
        mask = self._narrowed(mask, answer.allows_eos)
        return mask if any(mask) else None

    def _narrowed(self, mask: bytes, allows_eos: bool) -> bytes:
        """The mask without tokens that the model does not have, or that may not be drawn."""
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self._vocab_size]
        if not allows_eos:
            bits[[i for i in self._eos_token_ids if i < len(bits)]] = 0
        return np.packbits(bits, bitorder="little").tobytes()
