"""What a model can be asked to continue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """A prompt as token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """A prompt as embeddings: num_tokens rows of hidden_size values in the model's dtype."""

    num_tokens: int
    data: bytes


Prompt = TokensPrompt | EmbedsPrompt
