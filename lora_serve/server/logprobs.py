"""Log-probabilities in the formats of completions, chat, and prompt_logprobs.

Values are the engine's, bit for bit; only what is below any real one is clamped, because JSON
has no infinity.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from lora_serve.server.engine_api import Tokenizer
from lora_serve.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from lora_serve.step import TokenLogprobs

LOWEST = -9999.0


def clamp(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # so written that NaN is clamped too


class CompletionLogprobsWriter:
    """One choice's logprobs, piece by piece; counts the text that came before each token.

    text_offset counts whole characters, so a token that holds part of one has the offset at which
    that character will stand.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(
        self, positions: Sequence[TokenLogprobs], first_token_id: int | None = None
    ) -> CompletionLogprobs:
        """Logprobs of the next tokens.

        first_token_id: a token before them that has no logprob: the first of an echoed prompt.
        """
        token_ids = [position.token_id for position in positions]
        values: list[float | None] = [clamp(position.logprob) for position in positions]
        tops: list[dict[str, float] | None] = [self._top(position) for position in positions]
        if first_token_id is not None:
            token_ids.insert(0, first_token_id)
            values.insert(0, None)
            tops.insert(0, None)
        return CompletionLogprobs(
            tokens=[self._tokenizer.token_text(token_id) for token_id in token_ids],
            token_logprobs=values,
            top_logprobs=tops,
            text_offset=[self._next_offset(token_id) for token_id in token_ids],
        )

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the one that stands there. Of equal texts the likeliest."""
        text = self._tokenizer.token_text
        top: dict[str, float] = {}
        for token_id, logprob in (*position.top, (position.token_id, position.logprob)):
            top.setdefault(text(token_id), clamp(logprob))
        return top

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def chat_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
    def top_logprob(token_id: int, logprob: float) -> TopLogprob:
        text, raw = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return TopLogprob(text, clamp(logprob), list(raw))

    return ChatLogprobs(
        [
            TokenLogprob(
                token=tokenizer.token_text(position.token_id),
                logprob=clamp(position.logprob),
                bytes=list(tokenizer.token_bytes(position.token_id)),
                top_logprobs=[top_logprob(*entry) for entry in position.top],
            )
            for position in positions
        ]
    )


def prompt_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """By token id; None for the first token, which nothing predicts."""
    return [None, *(_prompt_position(tokenizer, position) for position in positions)]


def _prompt_position(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[int, PromptLogprob]:
    entries = {
        token_id: PromptLogprob(clamp(logprob), rank, tokenizer.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(position.top, start=1)
    }
    entries[position.token_id] = PromptLogprob(
        clamp(position.logprob), position.rank, tokenizer.token_text(position.token_id)
    )
    return entries
