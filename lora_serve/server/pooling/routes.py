"""Rows of the table of routes: hidden states, and how close texts are."""

from __future__ import annotations

from lora_serve.server.operation import Access, Operation
from lora_serve.server.pooling.answers import CohereEmbeddings, PooledList, Ranking, ScoreList
from lora_serve.server.pooling.protocol import (
    CohereEmbedBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)

SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")

OPERATIONS = (
    Operation(
        method="post",
        path="/pooling",
        summary="Embeddings of texts, or of each of their tokens",
        access=Access.KEY,
        answer=PooledList,
        body=PoolingBody,
        example={"input": "Once upon a time", "task": "token_embed"},
        generates=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v2/embed",
        summary="Embeddings of texts, in Cohere's form",
        access=Access.KEY,
        answer=CohereEmbeddings,
        body=CohereEmbedBody,
        example={"texts": ["Once upon a time"], "embedding_types": ["float"]},
        generates=True,
        names_model=True,
    ),
    *(
        Operation(
            method="post",
            path=path,
            summary="How close pairs of texts are",
            access=Access.KEY,
            answer=ScoreList,
            body=ScoreBody,
            example={"queries": "Hello", "documents": ["Hi", "Good day"]},
            generates=True,
            names_model=True,
        )
        for path in SCORE_PATHS
    ),
    *(
        Operation(
            method="post",
            path=path,
            summary="Documents in the order of how close they are to a query",
            access=Access.KEY,
            answer=Ranking,
            body=RerankBody,
            example={"query": "Hello", "documents": ["Hi", "Good day"], "top_n": 1},
            generates=True,
            names_model=True,
        )
        for path in RERANK_PATHS
    ),
)
