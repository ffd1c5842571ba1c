"""POST /tokenize and /detokenize: what a model makes of a text, without running it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError
from lora_serve.server.context import ServerContext
from lora_serve.server.http.json_response import json_response
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import require_model
from lora_serve.server.openai.protocol import DetokenizeBody, TokenizeBody
from lora_serve.server.openai.responses import Detokenized, Tokenized


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


async def _tokenize_input(context: ServerContext, body: TokenizeBody) -> Input:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return await context.inputs.from_text(body.prompt, body.add_special_tokens is not False)
    assert body.messages is not None, "one of the two was given"
    return await context.inputs.from_chat(body.messages, body, chat_template=context.chat_template)
