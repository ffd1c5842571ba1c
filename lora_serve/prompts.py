"""The two forms of a prompt that has been read and bounded: token ids, or embedding rows.

Knows neither a tokenizer nor a model: whoever makes one has checked it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """data: num_tokens rows of hidden_size values, in the model's dtype, contiguous."""

    num_tokens: int
    data: bytes


Prompt = TokensPrompt | EmbedsPrompt
