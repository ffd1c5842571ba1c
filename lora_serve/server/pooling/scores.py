"""POST /score and /rerank: how close texts are, by the cosine between their embeddings.

Both run as /v1/embeddings does; a query with several documents is embedded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.outputs import RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import share_of
from lora_serve.server.openai.embeddings import PooledRequest
from lora_serve.server.openai.fields import MAX_INPUTS
from lora_serve.server.openai.generation import AnswerPrefix, respond_whole
from lora_serve.server.openai.inputs import Input, Truncation
from lora_serve.server.openai.parameters import truncation
from lora_serve.server.pooling.answers import (
    RankedDocument,
    RankedResult,
    Ranking,
    Score,
    ScoreList,
)
from lora_serve.server.pooling.protocol import RerankBody, ScoreBody, ScoringBody

PAIRS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)


class Texts(NamedTuple):
    """One kind of texts of a body. max_tokens: of each, besides special ones; 0 for no limit."""

    name: str
    texts: tuple[str, ...]
    max_tokens: int


def scores_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/score")
    @router.post("/v1/score")
    async def score(request: Request) -> Response:
        return await answer_score(context, request, await context.bodies.read(request, ScoreBody))

    @router.post("/rerank")
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def rerank(request: Request) -> Response:
        return await answer_rerank(context, request, await context.bodies.read(request, RerankBody))

    return router


async def answer_score(context: ServerContext, request: Request, body: ScoreBody) -> Response:
    first, second = _pair(body)
    asked = await _scored(context, request, body, first, second)
    answer = partial(_score_list, asked, len(first.texts))
    return await respond_whole(request, asked.generation, answer)


async def answer_rerank(context: ServerContext, request: Request, body: RerankBody) -> Response:
    query = Texts("query", (body.query,), body.max_tokens_per_query or 0)
    documents = Texts("documents", body.documents, body.max_tokens_per_doc or 0)
    asked = await _scored(context, request, body, query, documents)
    return await respond_whole(request, asked.generation, partial(_ranking, asked, body))


def _pair(body: ScoreBody) -> tuple[Texts, Texts]:
    """The two kinds of texts that the body has.

    Raises:
        InvalidRequestError: there are none, or more.
    """
    given = {name for pair in PAIRS for name in pair if getattr(body, name)}
    for first, second in PAIRS:
        if given == {first, second}:
            limits = (body.max_tokens_per_query or 0, body.max_tokens_per_doc or 0)
            return (
                Texts(first, getattr(body, first), limits[0]),
                Texts(second, getattr(body, second), limits[1]),
            )
    pairs = ", ".join(" and ".join(pair) for pair in PAIRS)
    raise InvalidRequestError(
        f"give texts in one pair of fields: {pairs}; got {', '.join(sorted(given)) or 'none'}",
        min(given, default="queries"),
    )


async def _scored(
    context: ServerContext, request: Request, body: ScoringBody, first: Texts, second: Texts
) -> PooledRequest:
    """Ask for the embeddings of all texts, those of the first kind first."""
    num_first, num_second = len(first.texts), len(second.texts)
    if not num_second:
        raise InvalidRequestError(f"{second.name} is empty; give at least one text", second.name)
    if num_first not in (1, num_second):
        raise InvalidRequestError(
            f"Input lengths must be either 1:1, 1:N or N:N, got {num_first} {first.name} and "
            f"{num_second} {second.name}",
            second.name,
        )
    if num_first + num_second > MAX_INPUTS:
        raise InvalidRequestError(
            f"{num_first} {first.name} and {num_second} {second.name} are too many, at most "
            f"{MAX_INPUTS} together are allowed; send them in parts",
            second.name,
        )
    target = context.models.resolve(body.model)
    inputs = [
        await _input(context, request, body, kind, index)
        for kind in (first, second)
        for index in range(len(kind.texts))
    ]
    # Vectors of length 1 would be rounded before the cosine is taken.
    pooling = msgspec.structs.replace(context.engine.pooling_defaults, normalize=False)
    return PooledRequest(context, request, body, target, inputs, pooling, AnswerPrefix.SCORE)


async def _input(
    context: ServerContext, request: Request, body: ScoringBody, kind: Texts, index: int
) -> Input:
    """One text's tokens.

    Raises:
        InvalidRequestError: it has none, or more than the model takes.
    """
    share, text, info = share_of(request), kind.texts[index], context.engine.model_info
    adds_tokens = body.add_special_tokens is not False
    item = await context.inputs.from_text(share, text, adds_tokens, kind.name)
    if kind.max_tokens:
        plain = item
        if adds_tokens:
            plain = await context.inputs.from_text(share, text, False, kind.name)
        item = _cut(item, plain, kind.max_tokens)
    if (cut := truncation(body, info.max_model_len, 0)) is not None:
        item = cut.of(item)
    place = f"{kind.name}[{index}]"
    if not item.num_tokens:
        raise InvalidRequestError(f"{place} is empty; leave it out", kind.name)
    if item.num_tokens > info.max_request_tokens:
        raise PromptTooLongError(
            f"{place} has {item.num_tokens} tokens, at most {info.max_request_tokens} fit; shorten "
            "it, or set truncate_prompt_tokens",
            kind.name,
        )
    return item


def _cut(item: Input, plain: Input, max_tokens: int) -> Input:
    """The text's first tokens, with the special ones that stand around it.

    plain: the same text without these.
    """
    ids, num_plain = item.token_ids, plain.num_tokens
    if num_plain <= max_tokens:
        return item
    for start in range(len(ids) - num_plain + 1):
        end = start + num_plain
        if ids[start:end] == plain.token_ids:
            return Input(TokensPrompt((*ids[: start + max_tokens], *ids[end:])))
    return Truncation(max_tokens, keeps_start=True).of(item)  # they change how the text is cut


def _score_list(
    asked: PooledRequest, num_first: int, outputs: Sequence[RequestOutput]
) -> ScoreList:
    usage = asked.usage_of(outputs)
    return ScoreList(
        id=asked.response_id,
        created=asked.created,
        model=asked.model,
        data=[
            Score(index=index, score=score)
            for index, score in enumerate(cosines(outputs[:num_first], outputs[num_first:]))
        ],
        system_fingerprint=usage.fingerprint,
        usage=usage.usage,
    )


def _ranking(asked: PooledRequest, body: RerankBody, outputs: Sequence[RequestOutput]) -> Ranking:
    usage = asked.usage_of(outputs)
    scores = cosines(outputs[:1], outputs[1:])
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    shows = body.return_documents is not False
    return Ranking(
        id=asked.response_id,
        model=asked.model,
        results=[
            RankedResult(
                index=index,
                document=RankedDocument(text=body.documents[index]) if shows else None,
                relevance_score=scores[index],
            )
            for index in order[: body.top_n or None]
        ],
        system_fingerprint=usage.fingerprint,
        usage=usage.usage,
    )


def cosines(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> list[float]:
    """The cosine of each of the second with the first of its place, or with the only one."""
    these = [np.frombuffer(output.embedding, "<f4").astype(np.float64) for output in first]
    those = [np.frombuffer(output.embedding, "<f4").astype(np.float64) for output in second]
    return [_cosine(these[index % len(these)], vector) for index, vector in enumerate(those)]


def _cosine(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """0.0 where a vector has no direction. Summed without BLAS, whose order may hang on place."""
    lengths = np.sqrt(np.square(a).sum()) * np.sqrt(np.square(b).sum())
    cosine = float((a * b).sum() / lengths) if lengths else 0.0
    return min(1.0, max(-1.0, cosine))
