"""Draws prompts that share beginnings, so that they hit each other's blocks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from lora_serve.demo.corpus import LABEL_REQUESTS, sentence
from lora_serve.fuzz.trace import Chat, Embeds, Prompt, Text, Tokens
from lora_serve.fuzz.versions import INVOCATION

PREFIX_LENGTHS = (60, 120, 200)
INVOKED_SHARE = 0.5  # of the prompts of tokens
RESERVED_TOKENS = 3  # the first ids are often special


def token_ids(rng: Random, vocab_size: int, count: int) -> tuple[int, ...]:
    ids = range(RESERVED_TOKENS, vocab_size)
    return tuple(rng.choice(ids) for _ in range(count))


class PromptWriter:
    """Writes one trace's prompts. rng: the trace's, which draws the shared beginnings at once."""

    def __init__(
        self, rng: Random, vocab_size: int, seed: int, *, has_chat: bool, has_embeds: bool
    ) -> None:
        self._rng = rng
        self._invocation_rng = Random(f"invocations {seed}")
        self._vocab_size = vocab_size
        self._prefixes = [token_ids(rng, vocab_size, rng.choice(PREFIX_LENGTHS)) for _ in range(3)]
        self._row_seeds = [rng.randrange(2**31) for _ in range(3)]
        kinds: list[Callable[[], Prompt]] = [self._tokens, self._tokens, self._text]
        kinds += [self._chat] * has_chat + [self._embeds] * has_embeds
        self._kinds = kinds

    def draw(self) -> Prompt:
        return self._rng.choice(self._kinds)()

    def _tokens(self) -> Prompt:
        rng = self._rng
        if rng.random() < 0.3:
            return Tokens((*self._prefixes[0], *INVOCATION))  # the very same, again and again
        prefix = rng.choice(self._prefixes)
        kept = rng.choice((len(prefix), rng.randrange(len(prefix) + 1)))
        invocation = INVOCATION if self._invocation_rng.random() < INVOKED_SHARE else ()
        own = token_ids(rng, self._vocab_size, rng.randint(1, 8))
        return Tokens((*prefix[:kept], *invocation, *own))

    def _text(self) -> Prompt:
        shared = "The keeper reads every letter once more. " * self._rng.randrange(3)
        return Text(shared + sentence(self._rng) + " " + self._rng.choice(LABEL_REQUESTS))

    def _chat(self) -> Prompt:
        messages = [
            (role, text)
            for _ in range(self._rng.randrange(2))
            for role, text in (("user", LABEL_REQUESTS[0]), ("assistant", sentence(self._rng)))
        ]
        return Chat((*messages, ("user", self._rng.choice(LABEL_REQUESTS))))

    def _embeds(self) -> Prompt:
        shared = (self._rng.choice(self._row_seeds), self._rng.randrange(1, 150))
        return Embeds((shared, (self._rng.randrange(2**31), self._rng.randint(1, 5))))
