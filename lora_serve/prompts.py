"""The forms of a prompt that has been read and bounded: token ids, embedding rows, or both.

Knows neither a tokenizer nor a model: what makes a prompt has checked it.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from lora_serve.errors import InvalidRequestError
from lora_serve.identity import embeds_digest, placed_embeds_digest

# Rows that follow each other: the position of the first, how many, and how many rows are before.
Run = tuple[int, int, int]


def verify_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError for an id that is no token of the model's."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        token_id = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequestError(
            f"token id {token_id} is out of vocabulary: the model has {vocab_size} tokens", param
        )


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

    @property
    def runs(self) -> tuple[Run, ...]:
        return ((0, self.num_tokens, 0),)


class MixedPrompt(msgspec.Struct, frozen=True, tag="mixed"):
    """Tokens, and embedding rows among them.

    token_ids: 0 where a row stands. runs: all rows, by position. data: the rows, as EmbedsPrompt
    has them.
    """

    token_ids: tuple[int, ...]
    runs: tuple[Run, ...]
    data: bytes

    @classmethod
    def of(cls, parts: Iterable[Sequence[int] | EmbedsPrompt]) -> MixedPrompt:
        """Join token ids and rows, of which there must be some, in their order."""
        token_ids: list[int] = []
        runs: list[Run] = []
        pieces: list[bytes] = []
        num_rows = 0
        for part in parts:
            if isinstance(part, EmbedsPrompt):
                position, count, before = len(token_ids), part.num_tokens, num_rows
                if runs and sum(runs[-1][:2]) == position:
                    position, last, before = runs.pop()
                    count += last
                runs.append((position, count, before))
                pieces.append(part.data)
                num_rows += part.num_tokens
                token_ids += [0] * part.num_tokens
            else:
                token_ids += part
        assert runs, "a prompt without rows is a TokensPrompt"
        return cls(tuple(token_ids), tuple(runs), b"".join(pieces))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


EmbeddedPrompt = EmbedsPrompt | MixedPrompt
Prompt = TokensPrompt | EmbeddedPrompt


class PlacedRows(msgspec.Struct, frozen=True, gc=False):
    """The embedding rows of a stretch of a prompt.

    runs: (place within the stretch, number of rows) of rows that follow each other.
    """

    runs: tuple[tuple[int, int], ...]
    data: bytes


_ROW = -1  # stands for an embedding row where tokens are looked for
NO_ROWS = PlacedRows((), b"")


def rows_between(prompt: EmbeddedPrompt, start: int, end: int) -> PlacedRows:
    """The rows at the positions from start to end."""
    last, num_last, num_before = prompt.runs[-1]
    if start >= last + num_last:
        return NO_ROWS  # the usual case: the answer grows
    row_bytes = len(prompt.data) // (num_before + num_last)
    first = max(0, bisect_right(prompt.runs, (start, math.inf, 0)) - 1)
    runs: list[tuple[int, int]] = []
    pieces: list[bytes] = []
    for position, count, before in itertools.islice(prompt.runs, first, None):
        if position >= end:
            break
        begin, stop = max(position, start), min(position + count, end)
        if begin < stop:
            runs.append((begin - start, stop - begin))
            offset = (before + begin - position) * row_bytes
            pieces.append(prompt.data[offset : offset + (stop - begin) * row_bytes])
    return PlacedRows(tuple(runs), b"".join(pieces))


def last_occurrence(prompt: Prompt, token_ids: Sequence[int]) -> int | None:
    """Where these tokens begin in the prompt for the last time; None if they do not stand there."""
    places = array("i", prompt.token_ids)
    if not isinstance(prompt, TokensPrompt):
        for position, count, _ in prompt.runs if places else ():
            places[position : position + count] = array("i", [_ROW]) * count
    pattern, text = array("i", token_ids).tobytes(), places.tobytes()
    end = len(text)
    while (found := text.rfind(pattern, 0, end)) >= 0:
        if found % places.itemsize == 0:
            return found // places.itemsize
        end = found + len(pattern) - 1  # it began in the middle of a token
    return None


def embeds_digests(prompt: Prompt, block_size: int) -> tuple[bytes, ...]:
    """What identifies each block's rows, up to the last row; empty for a block without any."""
    if isinstance(prompt, TokensPrompt):
        return ()
    last, num_last, _ = prompt.runs[-1]
    return tuple(
        _digest(rows_between(prompt, start, start + block_size))
        for start in range(0, last + num_last, block_size)
    )


def _digest(rows: PlacedRows) -> bytes:
    if not rows.runs:
        return b""
    if len(rows.runs) == 1 and rows.runs[0][0] == 0:
        return embeds_digest(rows.data)
    return placed_embeds_digest(rows.data, [*itertools.chain.from_iterable(rows.runs)])
