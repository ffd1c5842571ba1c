"""All answers that follow a grammar at present, and the grammars that were compiled lately.

Computes what it is asked for at once; knows no process, and no time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import Grammar, Matcher
from lora_serve.structured_output.service import MaskReply
from lora_serve.structured_outputs import StructuredOutput


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
    constraint: StructuredOutput
    matcher: Matcher
    allows_eos: bool
    num_tokens: int = 0


class Answers:
    """The matchers of all answers, by request."""

    def __init__(self, cache: GrammarCache, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: of the model's logits; a tokenizer may know more tokens."""
        self._cache = cache
        self._vocab_size = vocab_size
        self._eos_token_ids = [i for i in eos_token_ids if i < vocab_size]
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
            mask = self._next_mask(answer, token_ids)
        except InvalidRequestError as error:
            # Earlier answers may have grown what all of this grammar share: the next one is new.
            self._cache.discard(answer.constraint)
            self.end(request_id)
            return MaskReply(request_id, answer.num_tokens, error=str(error))
        return MaskReply(request_id, answer.num_tokens, mask, is_finished=mask is None)

    def end(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def _next_mask(self, answer: _Answer, token_ids: Sequence[int]) -> bytes | None:
        """What may follow after some more tokens; None if nothing may."""
        for token_id in token_ids:
            answer.matcher.accept(token_id)
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
