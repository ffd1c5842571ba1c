"""POST /v2/embed: the embeddings of /v1/embeddings, in Cohere's form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError
from lora_serve.outputs import RequestOutput
from lora_serve.server.context import ServerContext
from lora_serve.server.field_names import field_names
from lora_serve.server.openai.embeddings import (
    PooledRequest,
    as_base64,
    as_numbers,
    ask_for_embeddings,
    pooling_params,
)
from lora_serve.server.openai.generation import AnswerPrefix, respond_whole
from lora_serve.server.pooling.answers import (
    BilledUnits,
    CohereEmbeddings,
    CohereMeta,
    TypedEmbeddings,
)
from lora_serve.server.pooling.protocol import COHERE_NAMES, CohereEmbedBody

BITS = 8  # values in one number of the binary forms
SIGN = 128  # what binary is below ubinary


def cohere_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v2/embed")
    async def embed(request: Request) -> Response:
        body = await context.bodies.read(request, CohereEmbedBody)
        with field_names(COHERE_NAMES):
            return await _embed(context, request, body)

    return router


async def _embed(context: ServerContext, request: Request, body: CohereEmbedBody) -> Response:
    if body.input_type is not None:
        raise InvalidRequestError(
            f"Unsupported input_type {body.input_type!r}. No prompts for input types are known of "
            "this model; leave it out, and write what it stands for into the texts",
            "input_type",
        )
    engine = context.engine
    embedding = body.embedding(engine.model_info.max_model_len)
    pooling = pooling_params(embedding, engine.pooling_defaults)
    _check_bits(body, pooling.dimensions or engine.model_info.hidden_size)
    asked = await ask_for_embeddings(
        context,
        request,
        embedding,
        pooling,
        AnswerPrefix.EMBEDDING,
        most_tokens=body.max_tokens if body.truncate == "NONE" else None,
    )
    return await respond_whole(request, asked.generation, partial(_answer, asked, body))


def _check_bits(body: CohereEmbedBody, width: int) -> None:
    if width % BITS and body.types & {"binary", "ubinary"}:
        raise InvalidRequestError(
            f"output_dimension {width} is no multiple of {BITS}, as binary and ubinary need; set "
            "another, or leave these embedding_types out",
            "output_dimension",
        )


def _answer(
    asked: PooledRequest, body: CohereEmbedBody, outputs: Sequence[RequestOutput]
) -> CohereEmbeddings:
    usage = asked.usage_of(outputs)
    return CohereEmbeddings(
        id=asked.response_id,
        embeddings=_typed(body.types, outputs),
        texts=body.texts,
        meta=CohereMeta(billed_units=BilledUnits(input_tokens=usage.usage.prompt_tokens)),
        system_fingerprint=usage.fingerprint,
    )


def _typed(types: set[str], outputs: Sequence[RequestOutput]) -> TypedEmbeddings:
    packed = [np.packbits(np.frombuffer(o.embedding, "<f4") >= 0).astype(int) for o in outputs]
    return TypedEmbeddings(
        floats=[as_numbers(output) for output in outputs] if "float" in types else UNSET,
        base64=[as_base64(output) for output in outputs] if "base64" in types else UNSET,
        binary=[(row - SIGN).tolist() for row in packed] if "binary" in types else UNSET,
        ubinary=[row.tolist() for row in packed] if "ubinary" in types else UNSET,
    )
