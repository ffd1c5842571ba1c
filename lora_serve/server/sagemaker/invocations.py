"""POST /invocations: a body of another route, answered as there.

Clients of SageMaker name an adapter in a header, because the platform reads it.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError
from lora_serve.server.context import ServerContext
from lora_serve.server.openai.chat import answer_chat
from lora_serve.server.openai.completions import answer_completion
from lora_serve.server.openai.embeddings import answer_embeddings
from lora_serve.server.openai.protocol import MAX_MODEL_CHARS, ChatBody, CompletionBody
from lora_serve.server.pooling.pooling import answer_pooling
from lora_serve.server.pooling.protocol import PoolingBody, RerankBody, ScoreBody
from lora_serve.server.pooling.scores import answer_rerank, answer_score
from lora_serve.server.sagemaker.protocol import InvocationBody

ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def invocations_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/invocations")
    async def invoke(request: Request) -> Response:
        invocation = await context.bodies.read(
            request, InvocationBody, takes_embeds=context.engine.config.model.enable_prompt_embeds
        )
        body = invocation.root
        if adapter := _adapter_of(request):
            body = body.model_copy(update={"model": adapter})
        if isinstance(body, ChatBody):
            return await answer_chat(context, request, body)
        if isinstance(body, CompletionBody):
            return await answer_completion(context, request, body)
        if isinstance(body, ScoreBody):
            return await answer_score(context, request, body)
        if isinstance(body, RerankBody):
            return await answer_rerank(context, request, body)
        if isinstance(body, PoolingBody):
            return await answer_pooling(context, request, body)
        return await answer_embeddings(context, request, body)

    return router


def _adapter_of(request: Request) -> str:
    """The adapter that the header names, which goes before the body's model; "" without one."""
    adapter = request.headers.get(ADAPTER_HEADER, "")
    if len(adapter) > MAX_MODEL_CHARS:
        raise InvalidRequestError(
            f"{ADAPTER_HEADER} must have at most {MAX_MODEL_CHARS} characters, "
            f"got {len(adapter)}; give an adapter's name",
            "model",
        )
    return adapter
