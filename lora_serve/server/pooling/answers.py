"""Bodies of answers of /pooling, /score, /rerank and /v2/embed, as clients read them."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from lora_serve.server.openai.answers import Usage


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """data: an embedding, or a list with one for each token; or base64 of little-endian float32."""

    index: int
    object: str = "pooling"
    data: list[float | list[float]] | str


class PooledList(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Pooled]
    system_fingerprint: str
    usage: Usage


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """score: the cosine of the angle between the embeddings of a pair."""

    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    system_fingerprint: str
    usage: Usage


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    multi_modal: None = None


class RankedResult(msgspec.Struct, frozen=True, kw_only=True):
    """index: of the document in the body. relevance_score: as a `Score`'s."""

    index: int
    document: RankedDocument | None
    relevance_score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """results: the closest document first; of equally close ones the earlier."""

    id: str
    model: str
    results: list[RankedResult]
    system_fingerprint: str
    usage: Usage


class TypedEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """Each input's embedding in each of the forms that were asked for.

    base64: little-endian float32. ubinary: a bit for each value, 1 unless it is negative, the first
    in a byte's highest bit; binary: 128 less than that.
    """

    floats: list[list[float]] | UnsetType = msgspec.field(default=UNSET, name="float")
    base64: list[str] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class ApiVersion(msgspec.Struct, frozen=True, kw_only=True):
    version: str = "2"


class BilledUnits(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    image_tokens: int = 0


class CohereMeta(msgspec.Struct, frozen=True, kw_only=True):
    api_version: ApiVersion = ApiVersion()
    billed_units: BilledUnits


class CohereEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    embeddings: TypedEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"
    system_fingerprint: str
