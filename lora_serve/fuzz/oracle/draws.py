"""What the requests of a trace ask, drawn so that it matters: prompts, rules, grammars, pooling.

What few requests have is drawn by a generator of its own each, so that to draw one more of them
leaves all others as they were.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from lora_serve.bitmask import bitmask_of
from lora_serve.fuzz.oracle.content import EOS, VOCAB_SIZE
from lora_serve.fuzz.oracle.drafts import Asked
from lora_serve.fuzz.oracle.engine import BLOCK_SIZE, ROW_BYTES
from lora_serve.fuzz.oracle.grammars import toy_constraint
from lora_serve.fuzz.oracle.loader import INVOCATION
from lora_serve.fuzz.oracle.lone_answers import holds, lone_answer
from lora_serve.messages import NO_RULES, TokenRules
from lora_serve.pooling import PoolingParams, PoolingType
from lora_serve.structured_outputs import ReasoningTokens, StructuredOutput


class RequestDraws:
    """What the requests of one trace ask."""

    def __init__(self, seed: int, rng: random.Random, grammar_rng: random.Random) -> None:
        """rng, grammar_rng: the trace draws other things from them, too."""
        self.rng = rng
        self._grammar_rng = grammar_rng
        self._forced_rng = random.Random(f"forced tokens {seed}")
        self._reasoning_rng = random.Random(f"reasoning {seed}")
        self._budget_rng = random.Random(f"budget {seed}")
        self._rules_rng = random.Random(f"rules {seed}")
        self._mixed_rng = random.Random(f"tokens among rows {seed}")
        self._invocation_rng = random.Random(f"invocations {seed}")
        self._scoring_rng = random.Random(f"prompt logprobs {seed}")
        self._pooling_rng = random.Random(f"pooling {seed}")
        self._token_pooling_rng = random.Random(f"pooling of tokens {seed}")
        self.prefixes = [self._tokens(rng.choice((20, 50, 100))) for _ in range(3)]
        self._embeds = [self._rows(rng.choice((20, 40))) for _ in range(2)]

    def prompt_or_rows(
        self, invocation: tuple[int, ...], repeated: Asked | None
    ) -> tuple[list[int], list[bytes]]:
        """A prompt, and the rows that stand in it; with an adapter's invocation tokens.

        Now and then others' prompts have such tokens, too, which are nothing to them.
        """
        rng, rows = self.rng, list[bytes]()
        if rng.random() < 0.2:
            rows = self._with_gaps(
                self.rng.choice(self._embeds)[: rng.randrange(1, 41)] + self._rows(1)
            )
            prompt = [0] * len(rows)
        else:
            prompt = self._prompt()
        if repeated is not None:
            prompt, rows = repeated.prompt, []
            wanted = () if holds(prompt, invocation) else invocation
        else:
            wanted = invocation or (INVOCATION if self._invocation_rng.random() < 0.25 else ())
        return self._invoked(prompt, rows, wanted) if wanted else (prompt, rows)

    def _invoked(
        self, prompt: list[int], rows: list[bytes], invocation: tuple[int, ...]
    ) -> tuple[list[int], list[bytes]]:
        """The prompt with invocation tokens in it: now and then twice, or once and a part of them.

        Those in a prefix of many stand where others have them, so that they share what is before.
        """
        rng = self._invocation_rng
        before = rng.choice(((), (), (), (invocation,), (invocation[:1],)))
        for tokens in (*before, invocation):
            usual = min(2 * BLOCK_SIZE - 1, len(prompt))  # across the end of a block
            place = rng.choice((len(prompt), rng.randrange(len(prompt)), usual, usual))
            prompt = [*prompt[:place], *tokens, *prompt[place:]]
            if rows:
                rows = [*rows[:place], *[b""] * len(tokens), *rows[place:]]
        return prompt, rows

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(8, VOCAB_SIZE) for _ in range(count)]

    def _rows(self, count: int) -> list[bytes]:
        return [self.rng.randbytes(ROW_BYTES) for _ in range(count)]

    def _with_gaps(self, rows: list[bytes]) -> list[bytes]:
        """Now and then, put tokens among rows: 0, which is what stands for a row elsewhere."""
        rng = self._mixed_rng
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            rows = [*rows[: (place := rng.randrange(min(len(rows), 8)))], b"", *rows[place:]]
        return rows

    def reasoning(
        self,
        prompt: Sequence[int],
        digest: bytes,
        max_tokens: int,
        rows: Sequence[bytes],
        num_groups: int,
        constraint: StructuredOutput | None,
        invocation: Sequence[int],
    ) -> ReasoningTokens | None:
        """Draw reasoning for every other answer, marked by tokens that it comes to."""
        rng = self._reasoning_rng
        if rng.random() < 0.5:
            return None
        ask = (prompt, digest, 1, rows, num_groups, constraint)
        (start,) = lone_answer(*ask, invocation=invocation)
        is_open = rng.random() < 0.5
        endless = ReasoningTokens(start, -1, is_open)
        ask = (prompt, digest, min(max_tokens, 8), rows, num_groups, constraint)
        answer = lone_answer(*ask, reasoning=endless, invocation=invocation)
        return ReasoningTokens(start, rng.choice(answer[not is_open :] or [start]), is_open)

    def budget(self) -> int | None:
        """Draw how long its reasoning may be, for some answers; half of them have reasoning."""
        rng = self._budget_rng
        return rng.choice((0, 1, 2, 5, 20)) if rng.random() < 0.4 else None

    def rules(self, answer: Sequence[int]) -> TokenRules:
        """Draw what a request allows and forbids: for every fifth one, and so that it matters.

        answer: without rules, of which bad words are made. A prompt's tokens are no part of them.
        """
        rng = self._rules_rng
        if rng.random() >= 0.2:
            return NO_RULES
        allowed = None
        if rng.random() < 0.5:
            allowed = bitmask_of(
                [EOS, *rng.sample(range(8, VOCAB_SIZE), rng.choice((10, 300)))], VOCAB_SIZE
            )
        places = [rng.randrange(len(answer)) for _ in range(3 if answer else 0)]
        words = [tuple(answer[max(0, end - rng.randrange(4)) : end + 1]) for end in places]
        return TokenRules(allowed, tuple(words))

    def constraint(self, repeated: Asked | None) -> StructuredOutput | None:
        """Draw one of few grammars for every third request; what is asked again has the same."""
        rng = self._grammar_rng
        constraint = None
        if rng.random() < 0.3:
            forced = self._forced_rng.choice((0, 60, 90))
            constraint = toy_constraint(rng.randrange(3), rng.choice((1, 5, 50)), forced)
        return constraint if repeated is None else repeated.constraint or constraint

    def scored_start(self, num_tokens: int) -> int | None:
        """Draw for every fifth request where its prompt logprobs begin."""
        rng = self._scoring_rng
        if rng.random() >= 0.2:
            return None
        return rng.choice((0, rng.randrange(num_tokens), max(0, num_tokens - 2)))

    def pooling(self) -> PoolingParams | None:
        """Draw what an embedding is made of for every fifth request."""
        kinds: list[PoolingType | None] = ["LAST", "MEAN", *(None,) * 8]
        pooling_type = self._pooling_rng.choice(kinds)
        if pooling_type is None:
            return None
        is_of_tokens = self._token_pooling_rng.random() < 0.3
        return PoolingParams(pooling_type="ALL" if is_of_tokens else pooling_type)

    def _prompt(self) -> list[int]:
        prompt = self.rng.choice(self.prefixes)[: self.rng.randrange(1, 101)] + self._tokens(1)
        return [*self.prefixes[0], 9] if self.rng.random() < 0.4 else prompt
