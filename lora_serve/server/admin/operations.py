"""Routes for those who run the server, and for tokenizers' users."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve import __version__
from lora_serve.errors import InvalidRequestError
from lora_serve.identity import EVERYTHING, Everything
from lora_serve.observability.http import HTTPMetrics
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import require_model
from lora_serve.server.openai.protocol import DetokenizeBody, ResetPrefixCacheBody, TokenizeBody
from lora_serve.server.openai.responses import (
    Detokenized,
    Load,
    Success,
    Tokenized,
    Version,
    json_response,
)


def operations_router(context: ServerContext, http_metrics: HTTPMetrics) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        context.drain.check()
        engine.check_health()
        return Response()

    @router.get("/version")
    async def version() -> Response:
        return json_response(Version(__version__))

    @router.get("/load")
    async def load() -> Response:
        return json_response(Load(http_metrics.num_generating))

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        context.keys.require_admin(caller_of(request))
        body = await context.bodies.read(request, ResetPrefixCacheBody, optional=True)
        lora_name = body.lora_name or _lora_name_in_query(request)
        return json_response(Success(await engine.reset_prefix_cache(lora_name)))

    return router


def tokens_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await context.bodies.read(request, TokenizeBody)
        await require_model(engine, context.models, body.model)
        token_ids = list((await _tokenize_input(context, body)).token_ids)
        limit = engine.model_info.max_model_len
        if not body.return_token_strs:
            return json_response(Tokenized(len(token_ids), limit, token_ids, None))

        def with_pieces() -> Response:
            pieces = [engine.tokenizer.token_piece(token_id) for token_id in token_ids]
            return json_response(Tokenized(len(token_ids), limit, token_ids, pieces))

        return await asyncio.to_thread(with_pieces)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await context.bodies.read(request, DetokenizeBody)
        await require_model(engine, context.models, body.model)
        vocab_size = engine.model_info.vocab_size
        if (token_id := max(body.tokens, default=0)) >= vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} is out of vocabulary: the model has {vocab_size} tokens",
                "tokens",
            )
        decode = engine.tokenizer.decode
        text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
        return json_response(Detokenized(text))

    return router


def _lora_name_in_query(request: Request) -> str | Everything:
    unknown = sorted(set(request.query_params) - {"lora_name"})
    if unknown:
        raise InvalidRequestError(
            f"unknown query parameters {unknown[:5]}; only lora_name is known", unknown[0]
        )
    return request.query_params.get("lora_name") or EVERYTHING


async def _tokenize_input(context: ServerContext, body: TokenizeBody) -> Input:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return await context.inputs.from_text(body.prompt, body.add_special_tokens is not False)
    assert body.messages is not None, "one of the two was given"
    return await context.inputs.from_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=context.chat_template,
        template_kwargs=body.chat_template_kwargs,
    )
