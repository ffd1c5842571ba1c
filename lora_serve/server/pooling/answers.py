"""Bodies of answers of /pooling, /score and /rerank, as vLLM's clients read them."""

from __future__ import annotations

import msgspec

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
