"""Answers of foreign servers, read leniently, and how two of them are compared.

Floats stay as JSON had them, so that equal means equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_serve.check.findings import JsonObject

MOST_ROUNDING = 0.25  # of a logprob: bfloat16 rarely moves one further, other weights mostly do
MOST_DEPTH = 8


class MalformedAnswerError(Exception):
    """JSON that is no answer of the completions API; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token's text, its logprob, and the most likely tokens in its place."""

    text: str
    logprob: float | None
    top: Mapping[str, float]


@dataclass(slots=True)
class Answer:
    """A completion, whole or as far as it came. Counts are None where the server tells none."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: object = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_pieces: int = 0

    def add(self, document: object) -> None:
        """Add an answer or a chunk of one. Raises MalformedAnswerError for anything else."""
        if not isinstance(document, dict):
            raise MalformedAnswerError(f"the answer is no JSON object but {type(document)}")
        if document.get("error"):
            raise MalformedAnswerError(f"an error in the answer: {document['error']}")
        choices = document.get("choices")
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise MalformedAnswerError("the answer has no list of choices")
        if choices:
            self._add_choice(choices[0])
        self.prompt_logprobs = document.get("prompt_logprobs") or self.prompt_logprobs
        self._add_usage(document.get("usage"))

    def _add_choice(self, choice: JsonObject) -> None:
        text = choice.get("text") or ""
        if not isinstance(text, str):
            raise MalformedAnswerError(f"the text of the answer is no text but {type(text)}")
        self.text += text
        self.num_pieces += bool(text)
        self.tokens += _tokens(choice.get("logprobs"))
        self.prompt_logprobs = choice.get("prompt_logprobs") or self.prompt_logprobs
        reason = choice.get("finish_reason")
        self.finish_reason = str(reason) if reason else self.finish_reason

    def _add_usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.num_cached_tokens = _count(cached, self.num_cached_tokens)
        self.num_prompt_tokens = _count(usage.get("prompt_tokens"), self.num_prompt_tokens)

    def beginning(self, num_tokens: int) -> Answer:
        """The answer as if it had ended after so many tokens."""
        return Answer(self.text, self.tokens[:num_tokens])


@dataclass(frozen=True, slots=True)
class Difference:
    """where: for a reader. is_rounding: small enough to come from another order of sums."""

    where: str
    is_rounding: bool = False


def difference(
    got: Answer, right: Answer, tolerance: float = 0.0, *, is_part: bool = False
) -> Difference | None:
    """The first difference between two answers, or None.

    Args:
        got: the answer to judge.
        right: what it must be.
        tolerance: how far logprobs may lie apart. If it is not 0, answers may also part where both
            tokens were about equally likely; what follows is not compared then.
        is_part: `got` may end earlier.
    """
    for index, (one, other) in enumerate(zip(got.tokens, right.tokens, strict=False)):
        if one.text != other.text:
            if tolerance and is_tie(one, other, tolerance):
                return None
            where = f"token {index + 1} is {_token(one)}, not {_token(other)}"
            return Difference(where, is_tie(one, other, MOST_ROUNDING))
        if found := _apart(one, other, tolerance):
            where = f"the logprob of token {index + 1}, {one.text!r}, {found[0]}"
            return Difference(where, found[1] <= MOST_ROUNDING)
    if is_part:
        is_start = bool(got.tokens) or right.text.startswith(got.text)
        return None if is_start else _texts(got.text, right.text)
    return _of_the_rest(got, right, tolerance)


def is_tie(one: Token, other: Token, tolerance: float) -> bool:
    """Whether each side held the other's token for about as likely as its own."""
    here, there = one.top.get(other.text), other.top.get(one.text)
    if one.logprob is None or other.logprob is None or here is None or there is None:
        return False
    gaps = (one.logprob - here, other.logprob - there)
    return all(abs(gap) <= 2 * tolerance for gap in gaps)


def distance(one: Answer, other: Answer) -> float:
    """How far two answers lie apart at most, in logprobs, as far as their tokens are the same.

    It is infinite if they differ and tell no logprobs.
    """
    if not one.tokens or not other.tokens:
        return 0.0 if one.text == other.text else math.inf
    most = 0.0
    for here, there in zip(one.tokens, other.tokens, strict=False):
        most = max(most, _gap(here, there))
        if here.text != there.text:
            break
    return most


def _gap(here: Token, there: Token) -> float:
    """How far apart two answers held the tokens that they chose at one place."""
    if here.text == there.text and here.logprob is not None and there.logprob is not None:
        return abs(here.logprob - there.logprob)
    gaps = [
        abs(a.logprob - value)
        for a, b in ((here, there), (there, here))
        if a.logprob is not None and (value := b.top.get(a.text)) is not None
    ]
    return max(gaps, default=math.inf)


def _of_the_rest(got: Answer, right: Answer, tolerance: float) -> Difference | None:
    if len(got.tokens) != len(right.tokens):
        return Difference(f"{len(got.tokens)} tokens, not {len(right.tokens)}")
    if got.text != right.text:
        return _texts(got.text, right.text)
    if got.finish_reason != right.finish_reason:
        return Difference(f"finish_reason is {got.finish_reason!r}, not {right.finish_reason!r}")
    apart = next(_unlike(got.prompt_logprobs, right.prompt_logprobs, tolerance), None)
    if apart is None:
        return None
    return Difference(f"prompt_logprobs{apart[0]}", apart[1] <= MOST_ROUNDING)


def _texts(got: str, right: str) -> Difference:
    pairs = enumerate(zip(got, right, strict=False))
    shorter = min(len(got), len(right))
    at = next((index for index, (a, b) in pairs if a != b), shorter)
    return Difference(f"character {at + 1}: {got[at : at + 40]!r}, not {right[at : at + 40]!r}")


def _token(token: Token) -> str:
    return f"{token.text!r} ({token.logprob})"


def _apart(one: Token, other: Token, tolerance: float) -> tuple[str, float] | None:
    """How two equal tokens' logprobs differ, and by how much; None if they do not."""
    if one.logprob is None or other.logprob is None:
        same = one.logprob == other.logprob
        return None if same else (f"is {one.logprob}, not {other.logprob}", math.inf)
    gap = abs(one.logprob - other.logprob)
    if gap > tolerance or math.isnan(gap):
        return f"is {one.logprob}, not {other.logprob}", gap
    if not tolerance and one.top != other.top:
        return f"stands among {dict(one.top)}, not {dict(other.top)}", 0.0
    return None


def _unlike(
    got: object, right: object, tolerance: float, depth: int = 0
) -> Iterator[tuple[str, float]]:
    """Where two JSON values differ, and by how much; numbers may by `tolerance`."""
    if depth > MOST_DEPTH:
        return
    if isinstance(got, dict) and isinstance(right, dict):
        yield from _unlike_objects(got, right, tolerance, depth)
    elif isinstance(got, list) and isinstance(right, list):
        if len(got) != len(right):
            yield f" has {len(got)} entries, not {len(right)}", math.inf
        for index, (one, other) in enumerate(zip(got, right, strict=False)):
            for where, gap in _unlike(one, other, tolerance, depth + 1):
                yield f"[{index}]{where}", gap
    elif isinstance(got, float | int) and isinstance(right, float | int):
        if not abs(got - right) <= tolerance:
            yield f" is {got}, not {right}", abs(got - right)
    elif got != right:
        yield f" is {str(got)[:80]}, not {str(right)[:80]}", math.inf


def _unlike_objects(
    got: JsonObject, right: JsonObject, tolerance: float, depth: int
) -> Iterator[tuple[str, float]]:
    both = [key for key in right if key in got]
    # Rounding changes which tokens are the most likely of a place, and their ranks.
    if (not tolerance and set(got) != set(right)) or (right and not both):
        yield f" has {_keys(got)}, not {_keys(right)}", 0.0 if both else math.inf
    for key in both:
        if not (tolerance and key == "rank"):
            for where, gap in _unlike(got[key], right[key], tolerance, depth + 1):
                yield f".{key}{where}", gap


def _keys(value: JsonObject) -> str:
    return str(sorted(map(str, value)))[:80]


def _tokens(logprobs: object) -> list[Token]:
    """Tokens in the words of completions (columns) or of chats (rows); none of anything else."""
    if not isinstance(logprobs, dict):
        return []
    if isinstance(rows := logprobs.get("content"), list):
        return [_of_row(row) for row in rows if isinstance(row, dict)]
    texts, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(texts, list) or not isinstance(values, list):
        return []
    tops = logprobs.get("top_logprobs")
    tops = tops if isinstance(tops, list) else [None] * len(texts)
    return [
        Token(str(text), _number(value), _top(top))
        for text, value, top in zip(texts, values, tops, strict=False)
    ]


def _of_row(row: JsonObject) -> Token:
    top = row.get("top_logprobs")
    pairs = [one for one in top if isinstance(one, dict)] if isinstance(top, list) else []
    likely = {str(one.get("token")): one.get("logprob") for one in pairs}
    return Token(str(row.get("token")), _number(row.get("logprob")), _top(likely))


def _top(top: Any) -> dict[str, float]:
    if not isinstance(top, dict):
        return {}
    numbers = {str(text): _number(value) for text, value in top.items()}
    return {text: number for text, number in numbers.items() if number is not None}


def _number(value: object) -> float | None:
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


def _count(value: object, default: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
