"""Which tokens of a chat's answer are told with it, and how many of all were reasoning.

With `include_reasoning: false` neither the text nor the tokens of reasoning are told: their ids and
log-probabilities would say the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from msgspec import structs

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.token_kinds import Kind, TokenKinds
from lora_serve.outputs import OutputDelta
from lora_serve.server.engine_api import Tokenizer
from lora_serve.server.openai.usage import UsageCounter
from lora_serve.step import TokenLogprobs

ALL = frozenset(Kind)


class ToldTokens:
    """One choice's tokens."""

    def __init__(
        self, kinds: TokenKinds, usage: UsageCounter, told: Collection[Kind] = ALL
    ) -> None:
        """usage: counts those that are reasoning. told: the kinds that are told."""
        self._kinds = kinds
        self._usage = usage
        self._told = told
        self._token_ids: deque[int] = deque()  # whose kinds are not known
        self._logprobs: deque[TokenLogprobs] = deque()  # of these tokens, or none at all

    def of(self, delta: OutputDelta) -> OutputDelta:
        """The delta with the tokens that are told from now on, in place of its own."""
        kinds = self._kinds.feed(delta.token_ids)
        if delta.finish_reason is not None:
            kinds += self._kinds.finish()
        self._usage.add_reasoning(kinds.count(Kind.REASONING))
        if self._told == ALL:
            return delta
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for kind in kinds:
            token_id = self._token_ids.popleft()
            logprob = self._logprobs.popleft() if self._logprobs else None
            if kind in self._told:
                token_ids.append(token_id)
                if logprob is not None:
                    logprobs.append(logprob)
        return structs.replace(delta, token_ids=tuple(token_ids), logprobs=tuple(logprobs))


def token_kinds(
    form: AnswerFormat,
    prompt_ending: str,
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool,
    finds_calls: bool = False,
) -> TokenKinds:
    """The kinds of one answer's tokens, whose text is decoded as the engine does it."""
    shown = {tokenizer.special_token_id(text) for text in form.special_tokens}

    hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()

    def is_hidden(token_id: int) -> bool:
        return token_id in hidden and token_id not in shown

    return TokenKinds(
        form, prompt_ending, tokenizer.token_bytes, is_hidden, finds_calls=finds_calls
    )
