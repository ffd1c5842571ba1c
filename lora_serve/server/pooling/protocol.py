"""Bodies of /pooling, /score and /rerank, as clients of vLLM, Jina and Cohere write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, PlainValidator, ValidationInfo

from lora_serve.server.openai.fields import (
    MAX_INPUTS,
    MAX_NAME_CHARS,
    Ignored,
    Unsupported,
    UnsupportedPadding,
    parse_content,
)
from lora_serve.server.openai.protocol import EmbeddingBody, ScheduledBody

NOT_A_TEXT = "must be a text, an object with a text, or a list of these"


def parse_scored_texts(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """A text, {"text": …}, {"content": [text parts]}, or a list of these."""
    if value is None:
        return ()
    if isinstance(value, list):
        if len(value) > MAX_INPUTS:
            raise ValueError(
                f"has {len(value)} texts, at most {MAX_INPUTS} are allowed; send them in parts"
            )
        return tuple(_scored_text(item, info) for item in value)
    return (_scored_text(value, info),)


def parse_scored_text(value: object, info: ValidationInfo) -> str:
    return _scored_text(value, info)


def _scored_text(value: object, info: ValidationInfo) -> str:
    if isinstance(value, Mapping):
        if len(value) != 1:
            raise ValueError(NOT_A_TEXT)
        ((name, value),) = value.items()
        if name == "content":
            value = parse_content(value, info)
        elif name != "text":
            raise ValueError(NOT_A_TEXT)
    if not isinstance(value, str):
        raise ValueError(NOT_A_TEXT)
    return value


_Object = dict[str, str | list[dict[str, str]]]
ScoredTexts = Annotated[
    tuple[str, ...],
    PlainValidator(parse_scored_texts, str | _Object | list[str | _Object] | None),
]
ScoredText = Annotated[str, PlainValidator(parse_scored_text, str | _Object)]
NumTokens = Annotated[int, Field(ge=0, le=2**31 - 1)]


class PoolingBody(EmbeddingBody):
    """POST /pooling: a body for embeddings. task: embed or token_embed."""

    task: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None


class ScoringBody(ScheduledBody):
    """How texts are compared. max_tokens_per_query, max_tokens_per_doc: 0 for no limit."""

    max_tokens_per_query: NumTokens | None = None
    max_tokens_per_doc: NumTokens | None = None
    use_activation: Ignored = None  # a cosine is the same for vectors of any length
    padding: UnsupportedPadding = None
    instruction: Unsupported = None
    chat_template_kwargs: Unsupported = None
    mm_processor_kwargs: Unsupported = None


class ScoreBody(ScoringBody):
    """POST /score: two kinds of texts, by any of four pairs of names."""

    queries: ScoredTexts = ()
    documents: ScoredTexts = ()
    items: ScoredTexts = ()
    text_1: ScoredTexts = ()
    text_2: ScoredTexts = ()
    data_1: ScoredTexts = ()
    data_2: ScoredTexts = ()


class RerankBody(ScoringBody):
    """POST /rerank. top_n: how many of the documents to give; 0 for all."""

    query: ScoredText
    documents: ScoredTexts
    top_n: NumTokens | None = None
    return_documents: bool | None = None
