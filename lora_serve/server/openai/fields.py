"""Types of body fields that JSON can write in several ways, and how each is brought to one form.

A validator raises ValueError with words that follow the field's name, as in "must be …".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo

from lora_serve.server.http.body import IGNORES_UNKNOWN

MAX_TOKEN_ID = 2**31 - 1
MAX_CACHE_SALT_CHARS = 1024
MAX_CONTENT_PARTS = 1024
MAX_PROMPTS = 1024
MAX_NAME_CHARS = 256  # of a role or a speaker

_NEUTRAL: tuple[object, ...] = (None, "", [], {}, "none", {"type": "text"})

TextOrTokens = str | tuple[int, ...]


def parse_prompts(value: object) -> tuple[TextOrTokens, ...]:
    """A text, token ids, or a list of either."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        if _is_token_ids(value):
            return (_token_ids(value),) if value else ()
        if len(value) > MAX_PROMPTS:
            raise ValueError(
                f"has {len(value)}, at most {MAX_PROMPTS} prompts are allowed; send them in parts"
            )
        return tuple(_text_or_tokens(item) for item in value)
    raise ValueError("must be a text, a list of token ids, or a list of either")


def parse_tokens(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and _is_token_ids(value):
        return _token_ids(value)
    raise ValueError("must be a list of token ids")


def parse_texts(value: object) -> tuple[str, ...]:
    """A text or a list of texts."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a string or a list of strings")


def parse_logit_bias(value: object) -> dict[int, float]:
    """{"token id": bias}. JSON has no other keys than strings."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and their biases")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise ValueError(f"has the key {key[:20]!r}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"has no number as the bias of token {key}")
        biases[int(key)] = _float(bias, key)
    return biases


def parse_content(value: object, info: ValidationInfo) -> str | None:
    """A message's text, if it has any; text parts are joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        if len(value) > MAX_CONTENT_PARTS:
            raise ValueError(
                f"has {len(value)} parts, at most {MAX_CONTENT_PARTS} are allowed; join them"
            )
        takes_more = bool((info.context or {}).get(IGNORES_UNKNOWN))
        return "\n".join(_part_text(part, takes_more) for part in value)
    raise ValueError("must be a string or a list of text parts")


def parse_num_logprobs(value: object) -> int | None:
    """Completions' `logprobs`; some clients write true for 1, and false for none."""
    if value is None or value is False:
        return None
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    raise ValueError("must be an integer")


def parse_cache_salt(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a non-empty string")
    if len(value) > MAX_CACHE_SALT_CHARS:
        raise ValueError(f"has {len(value)} characters, at most {MAX_CACHE_SALT_CHARS} are allowed")
    return value


def refuse_unless_neutral(value: object) -> None:
    """Refuse fields that this server does not offer, unless their value asks for nothing."""
    if value in _NEUTRAL or value is False:
        return
    raise ValueError("is not supported by this server; leave it out")


def neutral_is(*neutral: object) -> Callable[[object], None]:
    """The same for a field whose value for nothing is one of its own, such as a factor of 1."""

    def refuse_others(value: object) -> None:
        if value in neutral:
            return
        refuse_unless_neutral(value)

    return refuse_others


def drop(_: object) -> None:
    """Drop fields without effect: what they hold may be large, and would live as long as a body."""


def _is_token_ids(value: list[object]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _token_ids(value: list[int]) -> tuple[int, ...]:
    if value and not (min(value) >= 0 and max(value) <= MAX_TOKEN_ID):
        raise ValueError(f"has a token id outside of [0, {MAX_TOKEN_ID}]")
    return tuple(value)


def _text_or_tokens(item: object) -> TextOrTokens:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _is_token_ids(item):
        return _token_ids(item)
    raise ValueError("must be a list of texts or of lists of token ids")


def _part_text(part: object, takes_more: bool) -> str:
    """takes_more: fields beyond a text part's own are left out of account."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise ValueError(f"has a part of type {str(kind)[:40]!r}; only text parts are supported")
    assert isinstance(part, dict), "a part with a type is an object"
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError("has a text part without a string in `text`")
    unknown = sorted(part.keys() - {"type", "text"})
    if unknown and not takes_more:
        raise ValueError(f"has a text part with unknown fields {unknown[:5]}")
    return text


def _float(bias: int | float, key: str) -> float:
    try:
        number = float(bias)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"has no finite number as the bias of token {key}")
    return number


class Body(BaseModel):
    """No coercion (a string is no number), no NaN or infinity. `BodyReader` sees unknown fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


JsonObject = dict[str, object]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_Prompts = str | list[_TokenId] | list[str | list[_TokenId]] | None
_Text = dict[Literal["type", "text"], str]

# The last argument is what the OpenAPI document says of the field.
Prompts = Annotated[tuple[TextOrTokens, ...], PlainValidator(parse_prompts, _Prompts)]
Tokens = Annotated[tuple[int, ...], PlainValidator(parse_tokens, list[_TokenId])]
Texts = Annotated[tuple[str, ...], PlainValidator(parse_texts, str | list[str] | None)]
LogitBias = Annotated[dict[int, float], PlainValidator(parse_logit_bias, dict[str, float] | None)]
Content = Annotated[str | None, PlainValidator(parse_content, str | list[_Text] | None)]
CacheSalt = Annotated[
    str,
    PlainValidator(
        parse_cache_salt,
        Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None,
    ),
]
NumLogprobs = Annotated[int | None, PlainValidator(parse_num_logprobs, Integer | bool | None)]
Unsupported = Annotated[None, PlainValidator(refuse_unless_neutral, None)]
UnsupportedFactor = Annotated[None, PlainValidator(neutral_is(1), Literal[1] | None)]
UnsupportedModalities = Annotated[
    None, PlainValidator(neutral_is(["text"]), list[Literal["text"]] | None)
]
# Taken, and without effect: what clients send for other servers' sake.
Ignored = Annotated[object, PlainValidator(drop, object)]
