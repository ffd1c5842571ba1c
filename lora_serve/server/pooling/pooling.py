"""POST /pooling: embeddings of texts, or of each of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError
from lora_serve.outputs import RequestOutput
from lora_serve.pooling import PoolingParams
from lora_serve.server.context import ServerContext
from lora_serve.server.openai.embeddings import PooledRequest, ask_for_embeddings, pooling_params
from lora_serve.server.openai.generation import AnswerPrefix, respond_whole
from lora_serve.server.pooling.answers import Pooled, PooledList
from lora_serve.server.pooling.protocol import PoolingBody

TASKS = ("embed", "token_embed")


def pooling_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/pooling")
    async def pool(request: Request) -> Response:
        body = await context.bodies.read(request, PoolingBody)
        return await answer_pooling(context, request, body)

    return router


async def answer_pooling(context: ServerContext, request: Request, body: PoolingBody) -> Response:
    pooling = _params(body, context.engine.pooling_defaults)
    asked = await ask_for_embeddings(context, request, body, pooling, AnswerPrefix.POOLING)
    return await respond_whole(request, asked.generation, partial(_answer, asked, body))


def _params(body: PoolingBody, defaults: PoolingParams) -> PoolingParams:
    """Raise InvalidRequestError for a task that this server does not have, in vLLM's words."""
    task = body.task or "embed"
    if task == "plugin":
        raise InvalidRequestError(
            "No IOProcessor plugin installed. This server has none: use embed or token_embed",
            "task",
        )
    if task not in TASKS:
        raise InvalidRequestError(
            f"Unsupported task: {task[:40]!r} Supported tasks: {TASKS}; no classifier head is "
            "served",
            "task",
        )
    return pooling_params(body, defaults, of_tokens=task == "token_embed")


def _answer(
    asked: PooledRequest, body: PoolingBody, outputs: Sequence[RequestOutput]
) -> PooledList:
    usage = asked.usage_of(outputs)
    return PooledList(
        id=asked.response_id,
        created=asked.created,
        model=asked.model,
        data=[
            Pooled(index=index, data=_data(asked, body, output))
            for index, output in enumerate(outputs)
        ],
        system_fingerprint=usage.fingerprint,
        usage=usage.usage,
    )


def _data(
    asked: PooledRequest, body: PoolingBody, output: RequestOutput
) -> str | list[float | list[float]]:
    """One input's values; as numbers, those of tokens are in rows."""
    values = asked.written(output, body.encoding_format)
    if isinstance(values, str):
        return values
    if body.task != "token_embed":
        return [*values]
    width = len(values) // len(output.prompt_token_ids)
    return [values[start : start + width] for start in range(0, len(values), width)]
