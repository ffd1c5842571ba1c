"""What an answer must match, as the user asked for it: one constraint, as a kind and a text.

Knows no grammar: whether the text is one is found out where it is compiled (`structured_output/`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from lora_serve.bitmask import bitmask_of_one
from lora_serve.errors import InvalidRequestError

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]

MAX_TEXT_BYTES = 64 * 2**10
MAX_CHOICES = 4096


class ReasoningTokens(msgspec.Struct, frozen=True):
    """The reasoning that an answer may begin with, and that no grammar holds; it may be bounded.

    start, end: the tokens that mark it. is_open: the prompt has begun it; else it is begun by an
        answer whose first token is `start`, which is allowed there whatever the grammar says.
    """

    start: int
    end: int
    is_open: bool


class MaskedDrafts(msgspec.Struct, frozen=True):
    """Drafts that a grammar permits, with what may follow each of them.

    A draft is forced where it is the only token that the grammar allows behind those before it; the
    others are guesses.

    token_ids: one or more. bitmasks: what may follow each of them, as of `SampleInput`; b"" where
        that is the next of them alone. begins_forced: whether the first one is forced.
    """

    token_ids: tuple[int, ...]
    bitmasks: tuple[bytes, ...]
    begins_forced: bool = True

    @property
    def num_forced(self) -> int:
        """How many of them, the first ones, are forced."""
        if not self.begins_forced:
            return 0
        return 1 + next((i for i, mask in enumerate(self.bitmasks) if mask), len(self.bitmasks))

    def is_forced(self, place: int) -> bool:
        return not self.bitmasks[place - 1] if place else self.begins_forced

    def num_guesses(self, num_tokens: int) -> int:
        """How many of the first num_tokens are guesses."""
        return sum(not self.is_forced(place) for place in range(num_tokens))

    def bitmask_behind(self, num_tokens: int) -> bytes:
        """What may follow the first num_tokens of them."""
        return self.bitmasks[num_tokens - 1] or bitmask_of_one(self.token_ids[num_tokens])

    def narrowed(self, bitmasks: Sequence[bytes]) -> MaskedDrafts | None:
        """Keep as many as there are masks, which say what may follow; None for none."""
        if not bitmasks:
            return None
        inner = zip(self.bitmasks, bitmasks[:-1], strict=False)
        masks = (*(mask and narrowed for mask, narrowed in inner), bitmasks[-1])
        return MaskedDrafts(self.token_ids[: len(masks)], masks, self.begins_forced)


class Guess(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an answer may say next, for its grammar to say how far it permits that.

    most: tokens of it that are to be looked at beside those that the grammar forces.
    """

    token_ids: tuple[int, ...] = ()
    most: int = 0


NO_GUESS = Guess()


class StructuredOutput(msgspec.Struct, frozen=True):
    """Equal values are one grammar. Make one with `StructuredOutput.of`.

    kind: "json" has a JSON schema as its text, "json_object" none, "choice" a JSON list of strings,
        "grammar" one in Lark's or GBNF's notation, "structural_tag" the JSON of vLLM's format.
    is_strict: refuse a JSON schema with keywords that cannot be enforced, instead of ignoring them.
    scope: whose grammar it is, set by the engine. Nothing that is known of it helps other scopes:
        time would tell one tenant what another asks for.
    """

    kind: Kind
    text: str = ""
    is_strict: bool = True
    scope: str = ""

    @classmethod
    def of(
        cls,
        *,
        json: str | Mapping[str, object] | bool | None = None,
        json_object: bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        structural_tag: str | Mapping[str, object] | None = None,
        param: str = "structured_outputs",
    ) -> StructuredOutput:
        """Build the one constraint that is given, as vLLM's StructuredOutputsParams names them.

        Args:
            json: a JSON schema.
            choice: the answers that are allowed, one of which the whole answer will be.
            param: the request's field that holds the constraint, for what is raised.

        Raises:
            InvalidRequestError: none is given, or several, or one that holds no JSON.
        """
        given: dict[Kind, object] = {
            "json": json,
            "json_object": json_object or None,
            "regex": regex,
            "choice": None if choice is None else list(choice),
            "grammar": grammar,
            "structural_tag": structural_tag,
        }
        kinds = [kind for kind, value in given.items() if value is not None]
        if len(kinds) != 1:
            raise InvalidRequestError(
                f"{param} gives {' and '.join(kinds) or 'no constraint'}; give one of "
                f"{', '.join(given)}",
                param,
            )
        (kind,) = kinds
        return cls(kind, _text(kind, given[kind], param))

    def verify(self, param: str = "structured_outputs") -> None:
        """Raise InvalidRequestError for a text that is too large, or of no use, to be compiled."""
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{param}: the {self.kind} holds a lone surrogate, {self.text[error.start]!a}, "
                "which no answer can match; remove it",
                param,
            ) from error
        if num_bytes > MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"{param}: the {self.kind} has {num_bytes} bytes, at most {MAX_TEXT_BYTES} are "
                "allowed; shorten it",
                param,
            )
        if not self.text and self.kind != "json_object":
            raise InvalidRequestError(f"{param}: the {self.kind} is empty", param)
        if self.kind == "choice":
            _verify_choices(self.text, param)


def _verify_choices(text: str, param: str) -> None:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        choices = []
    if not choices or "" in choices:
        raise InvalidRequestError(f"{param}: choice must be a list of non-empty strings", param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(
            f"{param}: choice has {len(choices)} strings, at most {MAX_CHOICES} are allowed; "
            "give fewer",
            param,
        )


def _text(kind: Kind, value: object, param: str) -> str:
    if kind == "json_object":
        return ""
    if kind in ("regex", "grammar"):
        return str(value)
    # JSON in its shortest form; the order of keys stays, for it is that of the answer.
    try:
        if isinstance(value, str):
            value = json.loads(value)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"{param} holds no JSON: {error}", param) from error
    return text
