"""What a model makes of a text, without running it: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError, NotFoundError
from lora_serve.prompts import verify_vocabulary
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import share_of
from lora_serve.server.http.json_response import json_response
from lora_serve.server.openai.answers import AddedToken, Detokenized, Tokenized, TokenizerInfo
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import require_model
from lora_serve.server.openai.protocol import DetokenizeBody, TokenizeBody
from lora_serve.server.openai.text_work import TOKEN_CHARS

PURPOSES = ("bos", "eos", "pad", "unk")

MAX_DETOKENIZED = 2**17  # tokens: their texts may be a hundred times as long


def tokens_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await context.bodies.read(request, TokenizeBody)
        await require_model(engine, context.models, body.model)
        share = share_of(request)
        token_ids = (await _tokenize_input(context, share, body)).token_ids
        told = partial(_tokenized, context, token_ids, tells_texts=bool(body.return_token_strs))
        if not body.return_token_strs:
            return told()
        return await context.texts.run(share, len(token_ids) * TOKEN_CHARS, told)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await context.bodies.read(request, DetokenizeBody)
        await require_model(engine, context.models, body.model)
        _check_tokens(body.tokens, engine.model_info.vocab_size)
        told = partial(_detokenized, context, body.tokens)
        return await context.texts.run(share_of(request), len(body.tokens) * TOKEN_CHARS, told)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        if not context.config.enable_tokenizer_info_endpoint:
            raise NotFoundError(
                "/tokenizer_info is answered with --enable-tokenizer-info-endpoint only: it shows "
                "the chat template"
            )
        return json_response(_tokenizer_info(context))

    return router


def _tokenized(context: ServerContext, token_ids: Sequence[int], *, tells_texts: bool) -> Response:
    """Answer with the ids, and where texts are told with each token's, which takes long."""
    engine = context.engine
    texts = [engine.tokenizer.token_piece(i) for i in token_ids] if tells_texts else None
    limit = engine.model_info.max_model_len
    return json_response(Tokenized(len(token_ids), limit, list(token_ids), texts))


def _check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    verify_vocabulary(token_ids, vocab_size, "tokens")
    if len(token_ids) > MAX_DETOKENIZED:
        raise InvalidRequestError(
            f"tokens has {len(token_ids)} ids, at most {MAX_DETOKENIZED} are allowed; send "
            "several requests",
            "tokens",
        )


def _detokenized(context: ServerContext, token_ids: Sequence[int]) -> Response:
    text = context.engine.tokenizer.decode(token_ids, skip_special_tokens=False)
    return json_response(Detokenized(text))


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
