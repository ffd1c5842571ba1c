"""Tells of each token of an answer whether it is reasoning, content or a call.

The parts of an answer come from its text, whose pieces are no tokens. Here the same parsers read
the tokens one by one. A token that stands on a border belongs to what it ends; a marker belongs to
what it begins or ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from enum import Enum

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.parts import Content, Part


class Kind(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


class TokenKinds:
    """The tokens of one answer.

    token_bytes: of a token, within a text. is_hidden: whether it is left out of the text.
    finds_calls: whether calls are told from content; else both are content.
    """

    def __init__(
        self,
        form: AnswerFormat,
        prompt_ending: str,
        token_bytes: Callable[[int], bytes],
        is_hidden: Callable[[int], bool],
        *,
        finds_calls: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._is_hidden = is_hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._reasoning = form.reasoning_parser(prompt_ending)
        self._tools = form.tool_parser() if finds_calls else None
        self._plain = Kind.CALL if finds_calls and form.is_forced else Kind.CONTENT
        self._follows_call = False
        self._num_undecided = 0

    def feed(self, token_ids: Sequence[int]) -> list[Kind]:
        """The kinds that are certain now, of the oldest tokens whose kinds have not been told."""
        kinds: list[Kind] = []
        for token_id in token_ids:
            self._num_undecided += 1
            kind = self._read(token_id)
            if kind is not None:
                kinds += self._decide(kind)
        return kinds

    def finish(self) -> list[Kind]:
        """The kinds of the tokens that are left, once no more come."""
        return self._decide(Kind.CALL if self._follows_call else self._plain)

    def _decide(self, kind: Kind) -> list[Kind]:
        count, self._num_undecided = self._num_undecided, 0
        self._follows_call = kind is Kind.CALL
        return [kind] * count

    def _read(self, token_id: int) -> Kind | None:
        if self._reasoning is None and self._tools is None:
            return self._plain
        text = self._text(token_id)
        if self._reasoning is None:
            return self._read_answer(text)
        was_open = self._reasoning.is_open
        content = _content(self._reasoning.feed(text))
        is_open = self._reasoning.is_open
        if not is_open and self._reasoning.has_begun:
            self._reasoning = None  # there is none after it
            kind = self._read_answer(content)
            return Kind.REASONING if was_open else kind
        return Kind.REASONING if is_open else None

    def _read_answer(self, text: str) -> Kind | None:
        if self._tools is None:
            return Kind.CONTENT
        was_in_calls = self._tools.is_in_calls
        parts = self._tools.feed(text)
        if was_in_calls or self._tools.is_in_calls:
            return Kind.CALL
        return Kind.CONTENT if parts else None

    def _text(self, token_id: int) -> str:
        if self._is_hidden(token_id):
            return ""
        return self._decoder.decode(self._token_bytes(token_id))


def _content(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))
