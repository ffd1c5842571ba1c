"""Types of body fields that JSON can write in several ways, and how each is brought to one form.

A validator raises ValueError with words that follow the field's name, as in "must be …".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo

from lora_serve.server.http.body import IGNORES_UNKNOWN, shown_value

MAX_TOKEN_ID = 2**31 - 1
MAX_CACHE_SALT_CHARS = 1024
MAX_CONTENT_PARTS = 1024
MAX_PROMPTS = 1024
KEYS_NAMED = 4  # of the wrong ones, in an error
MAX_TEMPLATE_KWARGS_CHARS = 64 * 2**10
MAX_INPUTS = 2048  # of embeddings; as many as OpenAI takes
PART_FIELDS = MappingProxyType(  # output_text and refusal: of answers that come back
    {
        "text": "text",
        "input_text": "text",
        "output_text": "text",
        "refusal": "refusal",
        "prompt_embeds": "data",
    }
)
INERT_PART_FIELDS = frozenset({"cache_control"})
MAX_NAME_CHARS = 256  # of a role or a speaker

_NEUTRAL: tuple[object, ...] = (None, "", [], {}, "none", {"type": "text"})

TextOrTokens = str | tuple[int, ...]
JsonObject = dict[str, object]


def parse_prompts(value: object) -> tuple[TextOrTokens, ...]:
    return _texts_or_tokens(value, MAX_PROMPTS)


def parse_inputs(value: object) -> tuple[TextOrTokens, ...]:
    return _texts_or_tokens(value, MAX_INPUTS)


def _texts_or_tokens(value: object, limit: int) -> tuple[TextOrTokens, ...]:
    """A text, token ids, or a list of either."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        if _is_token_ids(value):
            return (_token_ids(value),) if value else ()
        if len(value) > limit:
            raise ValueError(
                f"has {len(value)}, at most {limit} prompts are allowed; send them in parts"
            )
        return tuple(_text_or_tokens(item) for item in value)
    raise ValueError("must be a text, a list of token ids, or a list of either")


def parse_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    if not _is_token_ids(value):
        at = next(index for index, item in enumerate(value) if not _is_token_ids([item]))
        raise ValueError(
            f"must be a list of token ids, which {shown_value(value[at])} is not (item {at})"
        )
    return _token_ids(value)


def parse_texts(value: object) -> tuple[str, ...]:
    """A text or a list of texts."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of strings")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise ValueError(
                "must be a string or a list of strings, which "
                f"{shown_value(item)} is not (item {index})"
            )
    return tuple(value)


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 11


def parse_logit_bias(value: object) -> dict[int, float]:
    """{"token id": bias}. JSON has no other keys than strings."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and their biases")
    if others := [key for key in value if not _is_token_id(key)]:
        named = ", ".join(repr(key[:20]) for key in others[:KEYS_NAMED])
        raise ValueError(f"has the keys {named}, which are no token ids")
    biases = {}
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"has no number as the bias of token {key}")
        biases[int(key)] = _float(bias, key)
    return biases


@dataclass(frozen=True, slots=True)
class EmbedsPart:
    """Embedding rows in a message. data: base64, as in `prompt_embeds` of completions."""

    data: str


Parts = tuple[str | EmbedsPart, ...]


def parse_content(value: object, info: ValidationInfo) -> str | Parts | None:
    """A message's text, if it has any; text parts are joined by newlines.

    With embeddings among them the parts stay apart.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        if not value:
            return None
        if len(value) > MAX_CONTENT_PARTS:
            raise ValueError(
                f"has {len(value)} parts, at most {MAX_CONTENT_PARTS} are allowed; join them"
            )
        takes_more = bool((info.context or {}).get(IGNORES_UNKNOWN))
        parts = tuple(_part(part, takes_more) for part in value)
        texts = [part for part in parts if isinstance(part, str)]
        return "\n".join(texts) if len(texts) == len(parts) else parts
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


def json_text(value: object, max_chars: int) -> str:
    """A value as JSON, written bit by bit: other threads run meanwhile.

    Raises:
        ValueError: it would be longer, which shows without writing the rest.
    """
    pieces, num_chars = [], 0
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise ValueError(
                f"has more than {max_chars} characters as JSON, which is the most; shorten it"
            )
    return "".join(pieces)


def check_template_kwargs(kwargs: JsonObject) -> JsonObject:
    json_text(kwargs, MAX_TEMPLATE_KWARGS_CHARS)
    return kwargs


def none_if_endless(budget: int) -> int | None:
    """The number, where -1 stands for any."""
    return None if budget == -1 else budget


def drop(_: object) -> None:
    """Drop fields without effect: what they hold may be large, and would live as long as a body."""


def _is_token_ids(value: list[object]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _token_ids(value: list[int]) -> tuple[int, ...]:
    if value and not (min(value) >= 0 and max(value) <= MAX_TOKEN_ID):
        bad = next(token_id for token_id in value if not 0 <= token_id <= MAX_TOKEN_ID)
        raise ValueError(
            f"has token id {shown_value(bad)}, which is out of vocabulary: ids are in "
            f"[0, {MAX_TOKEN_ID}]"
        )
    return tuple(value)


def _text_or_tokens(item: object) -> TextOrTokens:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _is_token_ids(item):
        return _token_ids(item)
    raise ValueError("must be a list of texts or of lists of token ids")


def _part(part: object, takes_more: bool) -> str | EmbedsPart:
    """takes_more: fields beyond a part's own are left out of account."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not (isinstance(kind, str) and kind in PART_FIELDS):
        raise ValueError(
            f"has a part of type {str(kind)[:40]!r}; only text parts and prompt_embeds are taken"
        )
    assert isinstance(part, dict), "a part with a type is an object"
    name = PART_FIELDS[kind]
    value = part.get(name)
    if not isinstance(value, str):
        raise ValueError(f"has a {kind} part without a string in `{name}`")
    asking = {key for key, held in part.items() if held is not None}
    unknown = sorted(asking - {"type", name} - INERT_PART_FIELDS)
    if unknown and not takes_more:
        raise ValueError(f"has a {kind} part with unknown fields {unknown[:5]}")
    return EmbedsPart(value) if kind == "prompt_embeds" else value


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


def shared_fields(
    first: type[Body], second: type[Body], *, but: Collection[str] = ()
) -> tuple[str, ...]:
    """Names of the fields that two bodies have in common. but: those that mean something else."""
    unknown = set(but) - (first.model_fields.keys() & second.model_fields.keys())
    assert not unknown, f"{first.__name__} and {second.__name__} do not share {sorted(unknown)}"
    return tuple(n for n in first.model_fields if n in second.model_fields and n not in but)


TemplateKwargs = Annotated[JsonObject, AfterValidator(check_template_kwargs)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_Prompts = str | list[_TokenId] | list[str | list[_TokenId]] | None
_Text = dict[Literal["type", "text"], str]
_Embeds = dict[Literal["type", "data"], str]

# The last argument is what the OpenAPI document says of the field.
Prompts = Annotated[tuple[TextOrTokens, ...], PlainValidator(parse_prompts, _Prompts)]
EmbeddingInputs = Annotated[tuple[TextOrTokens, ...], PlainValidator(parse_inputs, _Prompts)]
Tokens = Annotated[tuple[int, ...], PlainValidator(parse_tokens, list[_TokenId])]
Texts = Annotated[tuple[str, ...], PlainValidator(parse_texts, str | list[str] | None)]
LogitBias = Annotated[dict[int, float], PlainValidator(parse_logit_bias, dict[str, float] | None)]
Content = Annotated[
    str | Parts | None, PlainValidator(parse_content, str | list[_Text | _Embeds] | None)
]
CacheSalt = Annotated[
    str,
    PlainValidator(
        parse_cache_salt,
        Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None,
    ),
]
NumLogprobs = Annotated[int | None, PlainValidator(parse_num_logprobs, Integer | bool | None)]
ThinkingTokenBudget = Annotated[
    Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(none_if_endless)] | None, None
]
Unsupported = Annotated[None, PlainValidator(refuse_unless_neutral, None)]
UnsupportedFactor = Annotated[None, PlainValidator(neutral_is(1), Literal[1] | None)]
UnsupportedCount = Annotated[None, PlainValidator(neutral_is(0), Literal[0] | None)]
UnsupportedDtype = Annotated[None, PlainValidator(neutral_is("float32"), Literal["float32"] | None)]
UnsupportedEndianness = Annotated[
    None, PlainValidator(neutral_is("native", "little"), Literal["native", "little"] | None)
]
UnsupportedPadding = Annotated[
    None, PlainValidator(neutral_is("do_not_pad"), Literal["do_not_pad"] | None)
]
UnsupportedModalities = Annotated[
    None, PlainValidator(neutral_is(["text"]), list[Literal["text"]] | None)
]
# Taken, and without effect: what clients send for other servers' sake.
Ignored = Annotated[object, PlainValidator(drop, object)]
