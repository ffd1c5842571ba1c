"""POST /v1/embeddings: hidden states instead of an answer, of any model that answers."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError, PromptTooLongError
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
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import ModelTarget
from lora_serve.server.openai.parameters import chat_template, truncation
from lora_serve.server.openai.protocol import EmbeddingBody, ScheduledBody
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
    pooling = pooling_params(body, context.engine.pooling_defaults)
    asked = await ask_for_embeddings(context, request, body, pooling, AnswerPrefix.EMBEDDING)
    return await respond_whole(request, asked.generation, partial(_answer, asked, body))


def pooling_params(
    body: EmbeddingBody, defaults: PoolingParams, *, of_tokens: bool = False
) -> PoolingParams:
    """How the body's embeddings are made: as it says, else as the server's settings do."""
    normalize, dimensions = body.use_activation, body.dimensions
    return PoolingParams(
        pooling_type="ALL" if of_tokens else defaults.pooling_type,
        normalize=defaults.normalize if normalize is None else normalize,
        dimensions=defaults.dimensions if dimensions is None else dimensions,
    )


async def ask_for_embeddings(
    context: ServerContext,
    request: Request,
    body: EmbeddingBody,
    pooling: PoolingParams,
    prefix: AnswerPrefix,
    most_tokens: int | None = None,
) -> PooledRequest:
    """Ask for what is made of all inputs of a body.

    most_tokens: that an input may have, if fewer than the model takes.

    Raises:
        InvalidRequestError: there are none, the answer would be too large, or other faults.
    """
    engine = context.engine
    target = context.models.resolve(body.model)
    pooling.verify(engine.model_info.hidden_size, 1)
    inputs = await context.inputs.from_embedding(
        share_of(request),
        body,
        chat_template=chat_template(body, context),
        truncation=truncation(body, engine.model_info.max_model_len, 0),
    )
    if most_tokens is not None:
        _check_lengths(inputs, most_tokens)
    _check_size(engine, body, inputs, pooling)
    return PooledRequest(context, request, body, target, inputs, pooling, prefix)


def _check_lengths(inputs: Sequence[Input], most_tokens: int) -> None:
    for index, item in enumerate(inputs):
        if item.num_tokens > most_tokens:
            raise PromptTooLongError(
                f"input {index} has {item.num_tokens} tokens, max_tokens is {most_tokens}; shorten "
                "it, raise max_tokens, or let truncate be START or END",
                "input",
            )


def _check_size(
    engine: Engine, body: EmbeddingBody, inputs: Sequence[Input], pooling: PoolingParams
) -> None:
    """Raise InvalidRequestError for an answer that would take memory and time of all others."""
    width = pooling.dimensions or engine.model_info.hidden_size
    num_rows, rows = len(inputs), "inputs"
    if pooling.pooling_type == "ALL":
        num_rows, rows = sum(item.num_tokens for item in inputs), "tokens of inputs"
    encoding = body.encoding_format or "float"
    limit = MAX_BASE64_VALUES if encoding == "base64" else MAX_FLOATS
    if num_rows * width > limit:
        raise InvalidRequestError(
            f"{num_rows} {rows} with {width} dimensions are {num_rows * width} values, as "
            f"{encoding} at most {limit} are allowed; send the inputs in parts, lower dimensions, "
            f"or ask for base64 (at most {MAX_BASE64_VALUES}) by encoding_format, of /v2/embed by "
            "embedding_types",
            "input",
        )


class PooledRequest:
    """The hidden states that a body asks for, of all of its inputs, and what its answer tells."""

    def __init__(
        self,
        context: ServerContext,
        request: Request,
        body: ScheduledBody,
        target: ModelTarget,
        inputs: Sequence[Input],
        pooling: PoolingParams,
        prefix: AnswerPrefix,
    ) -> None:
        """prefix: of the answer's id."""
        self.model, self.created = target.shown, int(time.time())
        self.response_id = response_id(prefix, request, body)
        self._usage = UsageCounter(context.engine.model_info.fingerprint, inputs)
        prompts = [(item, PROMPT_ONLY) for item in inputs]
        requests = [
            msgspec.structs.replace(made, pooling=pooling)
            for made in scheduled_requests(context, request, body, target, prompts)
        ]
        self.generation = Generation(
            context.engine, target, requests, record_of(request), context.names, FIELD_NAMES
        )

    def usage_of(self, outputs: Sequence[RequestOutput]) -> UsageCounter:
        """What the finished outputs took; to be called once."""
        for index, output in enumerate(outputs):
            self._usage.add_output(index, output)
        return self._usage

    def written(self, output: RequestOutput, encoding: str | None) -> str | list[float]:
        """The values as the body's encoding_format says."""
        return as_base64(output) if encoding == "base64" else as_numbers(output)


def as_base64(output: RequestOutput) -> str:
    """Little-endian float32."""
    return base64.b64encode(output.embedding).decode()


def as_numbers(output: RequestOutput) -> list[float]:
    return array("f", output.embedding).tolist()


def _answer(
    asked: PooledRequest, body: EmbeddingBody, outputs: Sequence[RequestOutput]
) -> EmbeddingList:
    """One body's embeddings, in the order of its inputs."""
    usage = asked.usage_of(outputs)
    return EmbeddingList(
        id=asked.response_id,
        created=asked.created,
        model=asked.model,
        data=[
            Embedding(index=index, embedding=asked.written(output, body.encoding_format))
            for index, output in enumerate(outputs)
        ],
        system_fingerprint=usage.fingerprint,
        usage=usage.usage,
    )
