"""POST /v1/chat/completions/batch: several conversations in one body, a choice for each.

Each is answered as the body alone with it would be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError
from lora_serve.outputs import RequestOutput
from lora_serve.server.context import ServerContext
from lora_serve.server.http.disconnect import unless_disconnected
from lora_serve.server.openai.answer_size import chat_size
from lora_serve.server.openai.answers import ChatCompletion
from lora_serve.server.openai.chat import ChatAnswer, ChatForm
from lora_serve.server.openai.chat_plan import ChatPlan, plan_chat
from lora_serve.server.openai.generation import (
    AnswerPrefix,
    respond_whole,
    response_id,
    start_generation,
)
from lora_serve.server.openai.protocol import ChatBatchBody
from lora_serve.server.openai.usage import UsageCounter


def chat_batch_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions/batch")
    async def create_batch(request: Request) -> Response:
        body = await context.bodies.read(
            request, ChatBatchBody, takes_embeds=context.engine.config.model.enable_prompt_embeds
        )
        _check_offered(body)
        # A client that leaves takes with it what is still to be written, up to 1,024 templates.
        plans = await unless_disconnected(request.receive, _plans(context, request, body))
        first = plans[0]
        items = [plan.item for plan in plans]
        chat_size(first.body, first.params, stream=False).check(context.engine, items, first.params)
        answer = BatchAnswer(context, plans, response_id(AnswerPrefix.CHAT, request, body))
        prompts = [(plan.item, plan.params) for plan in plans]
        generation = start_generation(
            context, request, body, first.target, prompts, first.form.special_tokens
        )
        return await respond_whole(request, generation, answer.whole)

    return router


async def _plans(context: ServerContext, request: Request, body: ChatBatchBody) -> list[ChatPlan]:
    """What is asked of the engine, conversation by conversation."""
    first = await plan_chat(context, request, body.alone(body.messages[0]))
    plans = [first]
    for messages in body.messages[1:]:
        alone = first.body.model_copy(update={"messages": messages})
        plans.append(await plan_chat(context, request, alone, like=first))
    return plans


class BatchAnswer:
    """One body's answer. The choice of conversation i has the index i."""

    def __init__(self, context: ServerContext, plans: Sequence[ChatPlan], response_id: str) -> None:
        self._id = response_id
        self._created = int(time.time())
        self._model = plans[0].target.shown
        fingerprint = context.engine.model_info.fingerprint
        items = [plan.item for plan in plans]
        self._usage = UsageCounter(fingerprint, items, tells_reasoning=True)
        self._answers = [
            ChatAnswer(
                ChatForm.of(context, plan),
                plan.item,
                self._usage,
                response_id=response_id,
                model=self._model,
            )
            for plan in plans
        ]

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        choices = []
        for index, (answer, output) in enumerate(zip(self._answers, outputs, strict=True)):
            self._usage.add_output(index, output)
            (choice,) = answer.choices(output)
            choices.append(msgspec.structs.replace(choice, index=index))
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._usage.fingerprint,
            usage=self._usage.usage,
        )


def _check_offered(body: ChatBatchBody) -> None:
    """Raise InvalidRequestError for what one answer to several conversations has no place for."""
    transfer = body.kv_transfer_params
    asked = {
        "stream": bool(body.stream),
        "kv_transfer_params": transfer is not None and bool(transfer.prompt_token_ids),
        "tools": bool(body.tools),
        "n": body.n not in (None, 1),
        "prompt_logprobs": body.prompt_logprobs is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidRequestError(
                f"{name} is not offered for several conversations; leave it out, or send each "
                "conversation to /v1/chat/completions",
                name,
            )
