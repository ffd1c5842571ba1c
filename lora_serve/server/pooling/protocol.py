"""Bodies of /pooling, /score and /rerank, as clients of vLLM, Jina and Cohere write them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, ValidationInfo

from lora_serve.server.openai.fields import (
    MAX_INPUTS,
    Body,
    CacheSalt,
    Ignored,
    Integer,
    Name,
    Unsupported,
    UnsupportedPadding,
    parse_content,
)
from lora_serve.server.openai.protocol import EmbeddingBody, ModelName, RequestId, ScheduledBody

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

    task: Name | None = None


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


class CohereEmbedBody(Body):
    """POST /v2/embed, as Cohere's clients write it.

    max_tokens: of each text; what happens to a longer one is `truncate`'s.
    """

    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    model: ModelName | None = None
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    output_dimension: Integer | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    cache_salt: CacheSalt = ""
    priority: Integer | None = None
    request_id: RequestId | None = None
    input_type: Name | None = None

    images: Unsupported = None
    inputs: Unsupported = None

    def embedding(self, max_model_len: int) -> EmbeddingBody:
        """The same wish as a body of /v1/embeddings."""
        most_tokens = min(self.max_tokens or max_model_len, max_model_len)
        return EmbeddingBody.model_construct(
            input=tuple(self.texts),
            model=self.model,
            cache_salt=self.cache_salt,
            priority=self.priority,
            request_id=self.request_id,
            dimensions=self.output_dimension,
            encoding_format="base64" if self.types == {"base64"} else "float",
            truncate_prompt_tokens=None if self.truncate == "NONE" else most_tokens,
            truncation_side="left" if self.truncate == "START" else "right",
        )

    @property
    def types(self) -> set[str]:
        """The forms in which each embedding is told."""
        return set(self.embedding_types or ("float",))


# Of the fields that an error may name.
COHERE_NAMES = MappingProxyType({"input": "texts", "dimensions": "output_dimension"})
