"""The two forms of a prompt that has been read and bounded: token ids, or embedding rows.

Knows neither a tokenizer nor a model: what makes a prompt has checked it.
"""

from __future__ import annotations

import msgspec


class TokensPrompt(msgspec.Struct, frozen=True, tag="tokens"):
    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class EmbedsPrompt(msgspec.Struct, frozen=True, tag="embeds"):
    """data: num_tokens rows of hidden_size values, in the model's dtype, contiguous."""

    num_tokens: int
    data: bytes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """None: an embedding row is no token."""
        return ()


Prompt = TokensPrompt | EmbedsPrompt
