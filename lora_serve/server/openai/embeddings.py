"""POST /v1/embeddings: hidden states instead of an answer, of any model that answers."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Sequence
from types import MappingProxyType

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError
from lora_serve.outputs import RequestOutput
from lora_serve.pooling import PoolingParams
from lora_serve.sampling_params import PROMPT_ONLY
from lora_serve.server.context import ServerContext
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.auth import share_of
from lora_serve.server.http.request_record import record_of
from lora_serve.server.openai.answers import Embedding, EmbeddingList
from lora_serve.server.openai.generation import (
    AnswerPrefix,
    Generation,
    respond_whole,
    response_id,
    scheduled_requests,
)
from lora_serve.server.openai.parameters import chat_template, truncation
from lora_serve.server.openai.protocol import EmbeddingBody
from lora_serve.server.openai.usage import UsageCounter

# 40 MB of text each, roughly.
MAX_BASE64_VALUES = 2**23
MAX_FLOATS = 2**21
FIELD_NAMES = MappingProxyType({"prompt": "input"})


def embeddings_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def create_embeddings(request: Request) -> Response:
        body = await context.bodies.read(request, EmbeddingBody)
        return await answer_embeddings(context, request, body)

    return router


async def answer_embeddings(
    context: ServerContext, request: Request, body: EmbeddingBody
) -> Response:
    engine = context.engine
    target = context.models.resolve(body.model)
    pooling = pooling_params(body, engine.pooling_defaults)
    pooling.verify(engine.model_info.hidden_size, 1)
    inputs = await context.inputs.from_embedding(
        share_of(request),
        body,
        chat_template=chat_template(body, context),
        truncation=truncation(body, engine.model_info.max_model_len, 0),
    )
    _check_size(engine, body, len(inputs), pooling)
    answer = EmbeddingAnswer(
        is_base64=body.encoding_format == "base64",
        usage=UsageCounter(engine.model_info.fingerprint, inputs),
        response_id=response_id(AnswerPrefix.EMBEDDING, request, body),
        model=target.shown,
    )
    prompts = [(item, PROMPT_ONLY) for item in inputs]
    requests = [
        msgspec.structs.replace(made, pooling=pooling)
        for made in scheduled_requests(context, request, body, target, prompts)
    ]
    generation = Generation(
        engine, target, requests, record_of(request), context.names, FIELD_NAMES
    )
    return await respond_whole(request, generation, answer.whole)


def pooling_params(body: EmbeddingBody, defaults: PoolingParams) -> PoolingParams:
    """How the body's embeddings are made: as it says, else as the server's settings do."""
    normalize, dimensions = body.use_activation, body.dimensions
    return PoolingParams(
        pooling_type=defaults.pooling_type,
        normalize=defaults.normalize if normalize is None else normalize,
        dimensions=defaults.dimensions if dimensions is None else dimensions,
    )


def _check_size(
    engine: Engine, body: EmbeddingBody, num_inputs: int, pooling: PoolingParams
) -> None:
    """Raise InvalidRequestError for an answer that would take memory and time of all others."""
    num_values = pooling.dimensions or engine.model_info.hidden_size
    encoding = body.encoding_format or "float"
    limit = MAX_BASE64_VALUES if encoding == "base64" else MAX_FLOATS
    if num_inputs * num_values > limit:
        raise InvalidRequestError(
            f"{num_inputs} inputs with {num_values} dimensions are {num_inputs * num_values} "
            f"values, as {encoding} at most {limit} are allowed; send the inputs in parts, lower "
            f"dimensions, or set encoding_format to base64 (at most {MAX_BASE64_VALUES})",
            "input",
        )


class EmbeddingAnswer:
    """One body's embeddings, in the order of its inputs."""

    def __init__(
        self, *, is_base64: bool, usage: UsageCounter, response_id: str, model: str
    ) -> None:
        self._is_base64 = is_base64
        self._usage = usage
        self._id = response_id
        self._model = model
        self._created = int(time.time())

    def whole(self, outputs: Sequence[RequestOutput]) -> EmbeddingList:
        for index, output in enumerate(outputs):
            self._usage.add_output(index, output)
        return EmbeddingList(
            id=self._id,
            created=self._created,
            model=self._model,
            data=[
                Embedding(index=index, embedding=self._written(output.embedding))
                for index, output in enumerate(outputs)
            ],
            system_fingerprint=self._usage.fingerprint,
            usage=self._usage.usage,
        )

    def _written(self, embedding: bytes) -> str | list[float]:
        """Base64 of little-endian float32, or the same values as numbers."""
        if self._is_base64:
            return base64.b64encode(embedding).decode()
        return array("f", embedding).tolist()
