"""POST /v1/messages and /v1/messages/count_tokens: chats, told in Anthropic's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.call_ids import CallIds
from lora_serve.errors import InvalidRequestError, RequestAbortedError
from lora_serve.outputs import OutputDelta, RequestOutput
from lora_serve.server.anthropic.answers import (
    AnthropicMessage,
    ContentBlock,
    Ending,
    Event,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    TokenCount,
)
from lora_serve.server.anthropic.blocks import BlockWriter, whole_blocks
from lora_serve.server.anthropic.conversation import (
    OTHER_NAMES,
    conversation_body,
    generation_body,
    has_late_system,
)
from lora_serve.server.anthropic.errors import stream_form
from lora_serve.server.anthropic.protocol import (
    ConversationParams,
    CountTokensBody,
    MessagesBody,
)
from lora_serve.server.context import ServerContext
from lora_serve.server.field_names import field_names
from lora_serve.server.http.auth import share_of
from lora_serve.server.http.json_response import json_response
from lora_serve.server.http.request_ids import id_of
from lora_serve.server.http.streaming import StreamForm, named_event
from lora_serve.server.openai.chat_plan import plan_chat, start_chat
from lora_serve.server.openai.generation import AnswerPrefix, PromptDelta, respond, response_id
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import require_model
from lora_serve.server.openai.usage import UsageCounter

MESSAGES_PATH = "/v1/messages"


def messages_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    engine = context.engine
    template = TemplateProbe(context)

    @router.post(MESSAGES_PATH)
    async def create_message(request: Request) -> Response:
        sent = await context.bodies.read(request, MessagesBody)
        with field_names(OTHER_NAMES):
            return await create(request, sent)

    async def create(request: Request, sent: MessagesBody) -> Response:
        body = generation_body(sent, late_system=await template.takes_late_system(sent))
        body = body.model_copy(update={"thinking_token_budget": _thinking_budget(context, sent)})
        plan = await plan_chat(context, request, body)
        answer = MessageAnswer(
            plan.form,
            plan.item,
            UsageCounter(engine.model_info.fingerprint, [plan.item]),
            response_id=response_id(AnswerPrefix.MESSAGE, request, body),
            model=plan.target.shown,
            form=stream_form(id_of(request)),
        )
        generation = start_chat(context, request, plan)
        return await respond(request, generation, answer, stream=bool(body.stream))

    @router.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(request: Request) -> Response:
        sent = await context.bodies.read(request, CountTokensBody)
        await require_model(engine, context.models, sent.model)
        body = conversation_body(sent, late_system=await template.takes_late_system(sent))
        item = await context.inputs.from_chat(
            share_of(request), body.messages, body, chat_template=context.chat_template
        )
        return json_response(TokenCount(item.num_tokens))

    return router


def _thinking_budget(context: ServerContext, body: MessagesBody) -> int | None:
    """The most tokens of the answer's thinking, where the engine can see it begin and end."""
    budget = None if body.thinking is None else body.thinking.budget_tokens
    form = context.chat_formats.of(context.chat_template).reasoning
    engine = context.engine
    if engine.config.structured_outputs.structured_outputs_enable_in_reasoning:
        return None  # a grammar may hold the thinking
    if budget is None or form is None:
        return None
    encode = partial(engine.tokenizer.encode, add_special_tokens=False)
    return None if form.tokens(encode, "") is None else budget


class TemplateProbe:
    """Finds out, once, whether the chat template takes system messages after the first message."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._takes_late_system: bool | None = None

    async def takes_late_system(self, params: ConversationParams) -> bool:
        """True also where `params` has no such message."""
        if not has_late_system(params):
            return True
        if self._takes_late_system is None:
            self._takes_late_system = await asyncio.to_thread(self._probe)
        return self._takes_late_system

    def _probe(self) -> bool:
        roles = ("system", "user", "assistant", "system", "user")
        try:
            self._context.engine.tokenizer.render_chat(
                [{"role": role, "content": "text"} for role in roles],
                chat_template=self._context.chat_template,
            )
        except InvalidRequestError:
            return False
        return True


class MessageAnswer:
    """One body's answer: one message."""

    def __init__(
        self,
        answer: AnswerFormat,
        item: Input,
        usage: UsageCounter,
        *,
        response_id: str,
        model: str,
        form: StreamForm,
    ) -> None:
        self.stream_form = form
        tools = answer.tools
        ids = CallIds(item.token_ids, are_short=tools is not None and tools.has_short_ids)
        self._writer = BlockWriter(answer, ids, item.ending)
        self._usage = usage
        self._id = response_id
        self._model = model

    def whole(self, outputs: Sequence[RequestOutput]) -> AnthropicMessage:
        (output,) = outputs
        (choice,) = output.outputs
        _check_ending(choice.finish_reason)
        self._usage.add_output(0, output)
        blocks = whole_blocks(self._writer.write(choice.text, is_last=True))
        return self._message(blocks, self._writer.ending(choice.finish_reason, choice.stop_reason))

    async def events(self, deltas: AsyncIterator[PromptDelta]) -> AsyncIterator[bytes]:
        has_begun = False
        async for _, delta in deltas:
            _check_ending(delta.finish_reason)
            if not has_begun:
                has_begun = True
                self._usage.note_prompt(0, delta)
                start = MessageStart(self._message([], Ending(None, None)))
                yield named_event(start) + named_event(Ping())
            self._usage.add(0, delta)
            if told := b"".join(map(named_event, self._new_events(delta))):
                yield told

    def _new_events(self, delta: OutputDelta) -> Sequence[Event]:
        is_last = delta.finish_reason is not None
        events: list[Event] = [*self._writer.write(delta.text, is_last=is_last)]
        if is_last:
            ending = self._writer.ending(delta.finish_reason, delta.stop_reason)
            events += [MessageDelta(ending, self._told_usage), MessageStop()]
        return events

    def _message(self, content: list[ContentBlock], ending: Ending) -> AnthropicMessage:
        return AnthropicMessage(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=self._told_usage,
            system_fingerprint=self._usage.fingerprint,
        )

    @property
    def _told_usage(self) -> MessageUsage:
        usage = self._usage.usage
        num_cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
        )


def _check_ending(finish_reason: str | None) -> None:
    """Raise RequestAbortedError where Anthropic's API has no stop_reason for the ending."""
    if finish_reason == "abort":
        raise RequestAbortedError("this answer was aborted by a call; send the request again")
