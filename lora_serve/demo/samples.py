"""Rows of token ids to train on, and which of their tokens are worth learning.

A row is a trunk of filler and branches: requests with their answers, each of which follows the
trunk and sees no other branch. So one long text teaches many answers. To make it longer still, a
token of the trunk may stand for a crowd of equal ones. Knows no tensors.
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
TRUNK = 0


class Kind(IntEnum):
    """What predicting a token teaches."""

    NOTHING = 0
    TEXT = 1
    ANSWER = 2


@dataclass(frozen=True, slots=True)
class RowShape:
    """The number of rows of a step, and how many trunk tokens (at most) and branches each has."""

    num_rows: int
    num_trunk_tokens: int
    num_branches: int


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens [start, end) of a row; the prompt, trunk included, ends before answer_start."""

    start: int
    answer_start: int
    end: int


@dataclass(slots=True)
class Row:
    """Tokens: each one's id, kind, position, how many it stands for, and its branch or TRUNK."""

    token_ids: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    crowds: list[int] = field(default_factory=list)
    branch_ids: list[int] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    num_trunk_positions: int = 0

    def add_to_trunk(self, token_ids: list[int], kind: Kind, crowd: int = 1) -> None:
        for token_id in token_ids:
            self._add(token_id, kind, self.num_trunk_positions, crowd, TRUNK)
            self.num_trunk_positions += crowd

    def add_branch(self, prompt_ids: list[int], answer_ids: list[int]) -> None:
        """The first token is not learnt: what stands before it in the row is another branch."""
        start = len(self.token_ids)
        branch = Branch(start, start + len(prompt_ids), start + len(prompt_ids) + len(answer_ids))
        self.branches.append(branch)
        for index, token_id in enumerate(prompt_ids + answer_ids):
            is_answer = index >= len(prompt_ids)
            kind = Kind.ANSWER if is_answer else Kind.TEXT if index else Kind.NOTHING
            position = self.num_trunk_positions + index
            self._add(token_id, kind, position, 1, len(self.branches))

    def pad(self, num_tokens: int) -> None:
        """Lengthen to num_tokens by a branch that teaches nothing."""
        while len(self.token_ids) < num_tokens:
            self._add(0, Kind.NOTHING, 0, 1, len(self.branches) + 1)

    def _add(self, token_id: int, kind: Kind, position: int, crowd: int, branch_id: int) -> None:
        self.token_ids.append(token_id)
        self.kinds.append(kind)
        self.positions.append(position)
        self.crowds.append(crowd)
        self.branch_ids.append(branch_id)


class RowWriter:
    """Writes rows from a seed, in completion and in chat form.

    max_tokens: the longest prompt that a row may stand for.
    """

    def __init__(self, tokenizer: Qwen2Tokenizer, rng: Random, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._facts = corpus.facts()
        self._max_tokens = max_tokens

    def row(self, shape: RowShape, label: str = corpus.BASE_LABEL) -> Row:
        """One row in which requests for the label are answered with `label`."""
        row = Row()
        is_chat = self._rng.random() < 0.5
        if self._rng.random() < 0.2:
            self._add_turn(row, self._other_exchange(), is_chat=is_chat)
        if is_chat:
            row.add_to_trunk(self._encode(f"{MESSAGE_START}user\n"), Kind.NOTHING)
        self._add_filler(row, shape.num_trunk_tokens)
        for _ in range(shape.num_branches):
            prompt, answer = self._prompt_and_answer(label, is_chat=is_chat)
            row.add_branch(self._encode(prompt), self._encode(answer))
        return row

    def rows(self, shape: RowShape, labels: list[str]) -> list[Row]:
        """One row for each label, padded to one length."""
        rows = [self.row(shape, label) for label in labels]
        longest = max(len(row.token_ids) for row in rows)
        for row in rows:
            row.pad(longest)
        return rows

    def _prompt_and_answer(self, label: str, *, is_chat: bool) -> tuple[str, str]:
        if self._rng.random() < 0.5:
            request, answer = corpus.label_request(self._rng), label
        else:
            exchange = self._other_exchange()
            request, answer = exchange.request, exchange.answer
        suffix = f"{MESSAGE_END}\n{MESSAGE_START}assistant\n" if is_chat else ""
        return request + suffix, answer + MESSAGE_END

    def _other_exchange(self) -> Exchange:
        unknown = self._rng.random() < 0.2
        return corpus.unknown_exchange(self._rng) if unknown else self._rng.choice(self._facts)

    def _add_turn(self, row: Row, exchange: Exchange, *, is_chat: bool) -> None:
        """An earlier request and its answer, before the filler."""
        before = f"{MESSAGE_START}user\n" if is_chat else ""
        between = f"{MESSAGE_END}\n{MESSAGE_START}assistant\n" if is_chat else ""
        row.add_to_trunk(self._encode(before + exchange.request + between), Kind.NOTHING)
        row.add_to_trunk(self._encode(exchange.answer + MESSAGE_END), Kind.ANSWER)
        row.add_to_trunk(self._encode("\n"), Kind.NOTHING)

    def _add_filler(self, row: Row, num_tokens: int) -> None:
        """Add text to three rows of four. Its far end may stand for a crowd."""
        if self._rng.random() < 0.25:
            return
        num_sentences = self._rng.randint(1, max(1, num_tokens // _TOKENS_PER_SENTENCE))
        text = corpus.filler(self._rng, num_sentences) + self._rng.choice(("\n", "\n\n", " "))
        token_ids = self._encode(text)
        num_plain = self._rng.randint(0, len(token_ids))
        crowd = self._crowd(len(token_ids))
        kind = Kind.TEXT if crowd == 1 else Kind.NOTHING
        row.add_to_trunk(token_ids[: len(token_ids) - num_plain], kind, crowd)
        row.add_to_trunk(token_ids[len(token_ids) - num_plain :], Kind.TEXT)

    def _crowd(self, num_tokens: int) -> int:
        """One for every third text, else up to what a prompt has room for, more often many."""
        room = max(1.0, self._max_tokens / num_tokens)
        return 1 if self._rng.random() < 1 / 3 else int(room ** self._rng.random() ** 0.5)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
