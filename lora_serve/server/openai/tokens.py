"""What a model makes of a text, without running it: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError, NotFoundError
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import share_of
from lora_serve.server.http.json_response import json_response
from lora_serve.server.openai.answers import AddedToken, Detokenized, Tokenized, TokenizerInfo
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import require_model
from lora_serve.server.openai.protocol import DetokenizeBody, TokenizeBody

PURPOSES = ("bos", "eos", "pad", "unk")

MAX_DETOKENIZED = 2**17  # tokens: their texts may be a hundred times as long


def tokens_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await context.bodies.read(request, TokenizeBody)
        await require_model(engine, context.models, body.model)
        token_ids = list((await _tokenize_input(context, share_of(request), body)).token_ids)
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
        if len(body.tokens) > MAX_DETOKENIZED:
            raise InvalidRequestError(
                f"tokens has {len(body.tokens)} ids, at most {MAX_DETOKENIZED} are allowed; send "
                "several requests",
                "tokens",
            )

        def with_text() -> Response:
            text = engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
            return json_response(Detokenized(text))

        return await asyncio.to_thread(with_text)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        if not context.config.enable_tokenizer_info_endpoint:
            raise NotFoundError(
                "/tokenizer_info is answered with --enable-tokenizer-info-endpoint only: it shows "
                "the chat template"
            )
        return json_response(_tokenizer_info(context))

    return router


def _tokenizer_info(context: ServerContext) -> TokenizerInfo:
    tokenizer = context.engine.tokenizer
    added = {str(i): AddedToken(*token) for i, token in sorted(tokenizer.added_tokens().items())}
    named = {f"{purpose}_token": tokenizer.special_token(purpose) for purpose in PURPOSES}
    special = [token.content for token in added.values() if token.special]
    return TokenizerInfo(
        tokenizer_class=tokenizer.tokenizer_class,
        vocab_size=tokenizer.vocab_size,
        model_max_length=context.engine.model_info.max_model_len,
        additional_special_tokens=[text for text in special if text not in named.values()],
        added_tokens_decoder=added,
        chat_template=context.chat_template or tokenizer.chat_template,
        **named,
    )


async def _tokenize_input(context: ServerContext, share: str, body: TokenizeBody) -> Input:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return await context.inputs.from_text(
            share, body.prompt, body.add_special_tokens is not False
        )
    assert body.messages is not None, "one of the two was given"
    return await context.inputs.from_chat(
        share, body.messages, body, chat_template=context.chat_template
    )
