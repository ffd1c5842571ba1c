"""Draws crowds: one share's answers take all places, and another share comes late.

The other share has a prompt computed first, so that it has got more where shares are fair.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from lora_serve.fuzz.prompts import token_ids
from lora_serve.fuzz.trace import Ask, Tokens
from lora_serve.fuzz.versions import INVOCATION
from lora_serve.sampling_params import SamplingParams

CROWDS_SHARE = 0.02  # of the events of traces that can have them
SIZES = (2, 4, 8)  # requests, of which the smallest are as many as some servers have places
ANSWER_TOKENS = 40
FEW_MS = (0, 5, 20)


class CrowdWriter:
    """Writes one trace's crowds, with a generator of its own: the rest stays as it is."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._rng = Random(f"crowds {seed}")
        self._vocab_size = vocab_size

    def draw(self, names: Sequence[str]) -> list[Ask]:
        """Mostly nothing. names: of adapters that may be there."""
        rng = self._rng
        if rng.random() >= CROWDS_SHARE:
            return []
        other, crowd = rng.sample((None, *names), 2)
        size = rng.choice(SIZES)
        return [
            self._ask(other, 0, rng.choice((1, 60, 120)), 1),
            *(self._ask(crowd, 1, 4, ANSWER_TOKENS) for _ in range(size)),
            self._ask(other, 0, 4, rng.randrange(1, 20), wait_ms=rng.choice(FEW_MS)),
        ]

    def _ask(
        self, name: str | None, api_key: int, num_tokens: int, max_tokens: int, wait_ms: int = 0
    ) -> Ask:
        prompt = Tokens((*token_ids(self._rng, self._vocab_size, num_tokens), *INVOCATION))
        params = SamplingParams(max_tokens=max_tokens, seed=self._rng.randrange(1000))
        return Ask(prompt=prompt, params=params, lora_name=name, api_key=api_key, wait_ms=wait_ms)
