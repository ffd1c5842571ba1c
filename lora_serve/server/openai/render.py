"""POST /v1/completions/render and /v1/chat/completions/render: what would be generated from.

Bodies are those of the routes that generate, and are checked as there; nothing runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import share_of
from lora_serve.server.http.json_response import json_response
from lora_serve.server.openai.answers import RenderedPrompt
from lora_serve.server.openai.chat_plan import plan_chat
from lora_serve.server.openai.completion_plan import plan_completion
from lora_serve.server.openai.generation import AnswerPrefix, response_id
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import require_model
from lora_serve.server.openai.protocol import ChatBody, CompletionBody, GenerationBody
from lora_serve.server.openai.text_work import TOKEN_CHARS
from lora_serve.structured_outputs import StructuredOutput

MAX_PARAMS_BYTES = 16 * 2**20  # in one answer


def render_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.post("/v1/completions/render")
    async def render_completion(request: Request) -> Response:
        body = await context.bodies.read(request, CompletionBody)
        if body.prompt_embeds:
            raise _no_tokens("prompt_embeds")
        await require_model(engine, context.models, body.model)
        plan = await plan_completion(context, request, body)
        inputs, params = plan.inputs, plan.params
        request_id = response_id(AnswerPrefix.COMPLETION, request, body)

        def rendered() -> Response:
            ids = _ids(request_id, len(inputs))
            plain = _plain(params)
            _check_size(len(bytes(plain)), len(inputs))
            return json_response(
                [
                    _rendered(context, body, each_id, item, plain)
                    for each_id, item in zip(ids, inputs, strict=True)
                ]
            )

        num_tokens = sum(item.num_tokens for item in inputs)
        return await context.texts.run(share_of(request), num_tokens * TOKEN_CHARS, rendered)

    @router.post("/v1/chat/completions/render")
    async def render_chat(request: Request) -> Response:
        body = await context.bodies.read(request, ChatBody)
        await require_model(engine, context.models, body.model)
        plan = await plan_chat(context, request, body)
        if not isinstance(plan.item.prompt, TokensPrompt):
            raise _no_tokens("messages")
        request_id = response_id(AnswerPrefix.CHAT, request, body)

        def rendered() -> Response:
            params = plan.params
            if params.max_tokens is None:
                room = max(0, engine.model_info.max_request_tokens - plan.item.num_tokens)
                params = msgspec.structs.replace(params, max_tokens=room)
            plain = _plain(params)
            return json_response(_rendered(context, body, request_id, plan.item, plain))

        num_chars = plan.item.num_tokens * TOKEN_CHARS
        return await context.texts.run(share_of(request), num_chars, rendered)

    return router


def _no_tokens(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}: prompt_embeds are no tokens, so they cannot be rendered; leave them out", param
    )


def _check_size(num_bytes: int, num_prompts: int) -> None:
    """Raise InvalidRequestError where sampling_params, told with each prompt, are too much."""
    if num_bytes * num_prompts > MAX_PARAMS_BYTES:
        raise InvalidRequestError(
            f"prompt: the answer would tell {num_bytes} bytes of sampling_params with each of "
            f"{num_prompts} prompts, {num_bytes * num_prompts} in all, at most {MAX_PARAMS_BYTES} "
            "are allowed; send fewer prompts at once",
            "prompt",
        )


def _ids(request_id: str, num_prompts: int) -> Sequence[str]:
    if num_prompts == 1:
        return [request_id]
    return [f"{request_id}-{index}" for index in range(num_prompts)]


def _rendered(
    context: ServerContext,
    body: GenerationBody,
    request_id: str,
    item: Input,
    params: msgspec.Raw,
) -> RenderedPrompt:
    return RenderedPrompt(
        request_id=request_id,
        model=context.models.resolve(body.model).shown,
        prompt=context.engine.tokenizer.decode(item.token_ids, skip_special_tokens=False),
        token_ids=list(item.token_ids),
        sampling_params=params,
        stream=bool(body.stream),
        cache_salt=body.cache_salt or None,
        priority=body.priority or 0,
    )


def _plain(params: SamplingParams) -> msgspec.Raw:
    """The settings by vLLM's names, which are ours but for the constraint."""
    plain = {
        **msgspec.structs.asdict(params),
        "structured_outputs": _constraint(params.structured_outputs),
    }
    return msgspec.Raw(msgspec.json.encode(plain))


def _constraint(output: StructuredOutput | None) -> dict[str, object] | None:
    if output is None:
        return None
    match output.kind:
        case "json_object":
            return {"json_object": True}
        case "choice":
            return {"choice": json.loads(output.text)}
    return {output.kind: output.text}
