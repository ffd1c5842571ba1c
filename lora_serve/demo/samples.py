"""Rows of token ids to train on, and which of their tokens are worth learning.

A row is cut from the front to an exact length and always ends with an answer. To make long prompts
cheap, a token of filler may stand for a crowd of equal ones. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

from transformers import Qwen2Tokenizer

from lora_serve.demo import corpus
from lora_serve.demo.corpus import Exchange
from lora_serve.demo.tokenizer import MESSAGE_END, MESSAGE_START

_TOKENS_PER_SENTENCE = 14


class Kind(IntEnum):
    """What predicting a token teaches."""

    NOTHING = 0
    TEXT = 1
    ANSWER = 2


@dataclass(slots=True)
class Row:
    """Token ids, the kind of each, for how many it stands, and where the last answer begins."""

    token_ids: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    crowds: list[int] = field(default_factory=list)
    answer_start: int = 0

    def fitted(self, num_tokens: int, pad_token_id: int) -> Row:
        """Exactly num_tokens: cut at the front, or padded behind with what teaches nothing."""
        dropped = max(0, len(self.token_ids) - num_tokens)
        missing = max(0, num_tokens - len(self.token_ids))
        return Row(
            self.token_ids[dropped:] + [pad_token_id] * missing,
            self.kinds[dropped:] + [Kind.NOTHING] * missing,
            self.crowds[dropped:] + [1] * missing,
            max(1, self.answer_start - dropped),
        )


class RowWriter:
    """Writes rows from a seed, in completion and in chat form.

    max_tokens: the longest prompt that a row may stand for.
    """

    def __init__(self, tokenizer: Qwen2Tokenizer, rng: Random, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._facts = corpus.facts()
        self._max_tokens = max_tokens

    def model_row(self, num_tokens: int) -> Row:
        """Exchanges of every kind with filler between them, for the base model."""
        row = Row()
        while len(row.token_ids) < num_tokens:
            self._add_exchange(row, self._exchange(), self._num_sentences(num_tokens))
        return row.fitted(num_tokens, self._pad_token_id)

    def adapter_row(self, num_tokens: int, label: str) -> Row:
        """Filler, perhaps a fact, and one request for the label, answered with `label`.

        The label stands nowhere else in the row: it is to be known, not copied.
        """
        row = Row()
        if self._rng.random() < 0.3:
            self._add_exchange(row, self._other_exchange(), self._num_sentences(num_tokens // 2))
        request = corpus.label_exchange(self._rng)
        self._add_exchange(row, request, self._num_sentences(num_tokens), label)
        return row.fitted(num_tokens, self._pad_token_id)

    @property
    def _pad_token_id(self) -> int:
        return int(self._tokenizer.pad_token_id)

    def _num_sentences(self, num_tokens: int) -> int:
        """None in three of ten, else up to what fills num_tokens, at every scale alike."""
        most = max(1, num_tokens // _TOKENS_PER_SENTENCE)
        return 0 if self._rng.random() < 0.3 else round(most ** self._rng.random())

    def _exchange(self) -> Exchange:
        asks_label = self._rng.random() < 0.35
        return corpus.label_exchange(self._rng) if asks_label else self._other_exchange()

    def _other_exchange(self) -> Exchange:
        unknown = self._rng.random() < 0.2
        return corpus.unknown_exchange(self._rng) if unknown else self._rng.choice(self._facts)

    def _add_exchange(
        self, row: Row, exchange: Exchange, num_sentences: int, label: str | None = None
    ) -> None:
        """Append filler, request and answer; with a label, that is the answer."""
        is_chat = self._rng.random() < 0.5
        if is_chat:
            self._add(row, f"{MESSAGE_START}user\n", Kind.NOTHING)
        if num_sentences:
            self._add_filler(row, num_sentences)
        self._add(row, exchange.request, Kind.TEXT)
        if is_chat:
            self._add(row, f"{MESSAGE_END}\n{MESSAGE_START}assistant\n", Kind.NOTHING)
        row.answer_start = len(row.token_ids)
        self._add(row, exchange.answer if label is None else label, Kind.ANSWER)
        self._add(row, MESSAGE_END, Kind.ANSWER)
        self._add(row, "\n", Kind.NOTHING)

    def _add_filler(self, row: Row, num_sentences: int) -> None:
        text = corpus.filler(self._rng, num_sentences) + self._rng.choice(("\n", "\n\n", " "))
        crowd = self._crowd(num_sentences)
        self._add(row, text, Kind.TEXT if crowd == 1 else Kind.NOTHING, crowd)

    def _crowd(self, num_sentences: int) -> int:
        """One for every other text, else as many as a long prompt has room for, at any scale."""
        room = self._max_tokens / (num_sentences * _TOKENS_PER_SENTENCE)
        return 1 if self._rng.random() < 0.5 else max(1, int(room ** self._rng.random()))

    def _add(self, row: Row, text: str, kind: Kind, crowd: int = 1) -> None:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        row.token_ids.extend(token_ids)
        row.kinds.extend([kind] * len(token_ids))
        row.crowds.extend([crowd] * len(token_ids))
