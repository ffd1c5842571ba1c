"""Log-probabilities in the formats of completions, chat, and prompt_logprobs.

Values are the engine's, bit for bit; only what is below any real one is clamped, because JSON
has no infinity.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from lora_serve.server.engine_api import Tokenizer
from lora_serve.server.openai.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from lora_serve.step import TokenLogprobs

LOWEST = -9999.0


def token_names(tokenizer: Tokenizer, as_ids: bool) -> Callable[[int], str]:
    """What tokens are called: by their texts, or by "token_id:N", which no two have in common."""
    return "token_id:{}".format if as_ids else tokenizer.token_text


def clamp(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # so written that NaN is clamped too


class CompletionLogprobsWriter:
    """One choice's logprobs, piece by piece; counts the text that is shown before each token.

    text_offset counts whole characters, so a token that holds part of one has the offset at which
    that character will stand. A token that is not shown takes no room.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        tokens_as_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._name = token_names(tokenizer, tokens_as_ids)
        self._skips_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, positions: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Logprobs of the next tokens of the answer."""
        token_ids = [position.token_id for position in positions]
        shown = [b"" if self._is_skipped(t) else self._bytes(t) for t in token_ids]
        return CompletionLogprobs(
            tokens=[self._name(token_id) for token_id in token_ids],
            token_logprobs=[clamp(position.logprob) for position in positions],
            top_logprobs=[self._top(position) for position in positions],
            text_offset=self._offsets(shown),
        )

    def write_prompt(
        self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs], text: str
    ) -> CompletionLogprobs:
        """Logprobs of an echoed prompt; None for its first tokens, which have none.

        positions: of its last tokens. text: what is shown of it. Tokens that the tokenizer put
        before it take no room, and the answer begins where it ends.
        """
        unscored = [None] * (len(token_ids) - len(positions))
        shown = [self._bytes(token_id) for token_id in token_ids]
        surplus = len(b"".join(shown).decode("utf-8", "replace")) - len(text)
        offsets = [max(0, offset - surplus) for offset in self._offsets(shown)]
        self._decoder.reset()
        self._offset = len(text)
        return CompletionLogprobs(
            tokens=[self._name(token_id) for token_id in token_ids],
            token_logprobs=[*unscored, *(clamp(position.logprob) for position in positions)],
            top_logprobs=[*unscored, *(self._top(position) for position in positions)],
            text_offset=offsets,
        )

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """The token that stands there and the most likely ones; of equal names the most likely."""
        top = {self._name(position.token_id): clamp(position.logprob)}
        for token_id, logprob in position.top:
            name = self._name(token_id)
            top[name] = max(top.get(name, LOWEST), clamp(logprob))
        return top

    def _bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def _is_skipped(self, token_id: int) -> bool:
        # Twice, because some decoders drop a space at the start of a text.
        return self._skips_special and not self._tokenizer.decode([token_id, token_id])

    def _offsets(self, shown: Sequence[bytes]) -> list[int]:
        offsets = []
        for data in shown:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(data))
        return offsets


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def chat_logprobs(
    tokenizer: Tokenizer,
    positions: Sequence[TokenLogprobs],
    *,
    tokens_as_ids: bool = False,
    tells_drawn: bool = False,
) -> ChatLogprobs:
    """A token's bytes are its own, whatever it is called.

    tells_drawn: the drawn token stands among the alternatives, before them if it is none.
    """
    name, token_bytes = token_names(tokenizer, tokens_as_ids), tokenizer.token_bytes

    def top_logprob(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(name(token_id), clamp(logprob), list(token_bytes(token_id)))

    def alternatives(position: TokenLogprobs) -> list[TopLogprob]:
        top = position.top
        if tells_drawn and all(token_id != position.token_id for token_id, _ in top):
            top = ((position.token_id, position.logprob), *top)
        return [top_logprob(*entry) for entry in top]

    return ChatLogprobs(
        [
            TokenLogprob(
                token=name(position.token_id),
                logprob=clamp(position.logprob),
                bytes=list(token_bytes(position.token_id)),
                top_logprobs=alternatives(position),
            )
            for position in positions
        ]
    )


def prompt_logprobs(
    tokenizer: Tokenizer, num_tokens: int, positions: Sequence[TokenLogprobs]
) -> PromptLogprobs:
    """Logprobs by token id for each of a prompt's num_tokens.

    positions: of its last tokens. The others get None: the first, which nothing predicts, and those
    that were not asked for.
    """
    unscored = [None] * (num_tokens - len(positions))
    return [*unscored, *(_prompt_position(tokenizer, position) for position in positions)]


def _prompt_position(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[int, PromptLogprob]:
    entries = {
        token_id: PromptLogprob(clamp(logprob), rank, tokenizer.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(position.top, start=1)
    }
    entries[position.token_id] = PromptLogprob(
        clamp(position.logprob), position.rank, tokenizer.token_text(position.token_id)
    )
    return entries
