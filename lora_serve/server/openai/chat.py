"""POST /v1/chat/completions. Shares with completions everything but the shape of the answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.call_ids import CallIds
from lora_serve.chat.token_kinds import Kind
from lora_serve.outputs import CompletionOutput, OutputDelta, RequestOutput
from lora_serve.server.context import ServerContext
from lora_serve.server.field_names import field_names
from lora_serve.server.http.streaming import OPENAI_FORM, event
from lora_serve.server.openai.answer_form import AnswerForm
from lora_serve.server.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Usage,
)
from lora_serve.server.openai.chat_parts import ROLE, ChoiceParts
from lora_serve.server.openai.chat_plan import ChatPlan, plan_chat, start_chat
from lora_serve.server.openai.generation import (
    AnswerPrefix,
    PromptDelta,
    respond,
    response_id,
    written,
)
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.kv_transfer import answered
from lora_serve.server.openai.logprobs import chat_logprobs, prompt_logprobs
from lora_serve.server.openai.protocol import ChatBody
from lora_serve.server.openai.told_tokens import ALL, ToldTokens, token_kinds
from lora_serve.server.openai.usage import UsageCounter
from lora_serve.step import TokenLogprobs


def chat_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body = await context.bodies.read(
            request, ChatBody, takes_embeds=context.engine.config.model.enable_prompt_embeds
        )
        return await answer_chat(context, request, body)

    return router


async def answer_chat(context: ServerContext, request: Request, body: ChatBody) -> Response:
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with field_names(names):
        return await _answer(context, request, body)


async def _answer(context: ServerContext, request: Request, body: ChatBody) -> Response:
    plan = await plan_chat(context, request, body)
    answer = ChatAnswer(
        ChatForm.of(context, plan),
        plan.item,
        UsageCounter(
            context.engine.model_info.fingerprint,
            [plan.item],
            tells_times=context.config.enable_per_request_metrics,
            tells_reasoning=True,
        ),
        response_id=response_id(AnswerPrefix.CHAT, request, body),
        model=plan.target.shown,
    )
    generation = start_chat(context, request, plan)
    return await respond(request, generation, answer, stream=bool(body.stream))


@dataclass(frozen=True, slots=True)
class ChatForm(AnswerForm[ChatBody]):
    """answer: how the text is read."""

    answer: AnswerFormat

    @classmethod
    def of(cls, context: ServerContext, plan: ChatPlan) -> ChatForm:
        return cls(context.engine.tokenizer, plan.body, plan.params, context.config, plan.form)

    @property
    def echoed(self) -> str:
        """The last message with `echo`, if the answer continues the same speaker's words."""
        last = self.body.messages[-1]
        return last.text or "" if self.body.echo and last.role == ROLE else ""

    def told_tokens(self, prompt_ending: str, usage: UsageCounter) -> ToldTokens | None:
        """What becomes of one choice's tokens; None where no reasoning is looked for."""
        if self.answer.reasoning is None or self.answer.is_forced:
            return None
        kinds = token_kinds(
            self.answer,
            prompt_ending,
            self.tokenizer,
            skip_special_tokens=self.params.skip_special_tokens,
        )
        told = ALL if self.answer.include_reasoning else ALL - {Kind.REASONING}
        return ToldTokens(kinds, usage, told)

    def logprobs(self, positions: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self.params.logprobs is None:
            return None
        return chat_logprobs(
            self.tokenizer,
            positions,
            tokens_as_ids=self.tokens_as_ids,
            tells_drawn=bool(self.params.logprob_token_ids),
        )


class ChatAnswer:
    """One body's answer: n choices of one conversation's next message."""

    stream_form = OPENAI_FORM

    def __init__(
        self, form: ChatForm, item: Input, usage: UsageCounter, *, response_id: str, model: str
    ) -> None:
        self._form = form
        self._item = item
        self._usage = usage
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        tools = form.answer.tools
        self._call_ids = CallIds(
            item.token_ids, are_short=tools is not None and tools.has_short_ids
        )

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        self._usage.add_output(0, output)
        form = self._form
        choices = self.choices(output)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._usage.fingerprint,
            usage=self._usage.usage,
            metrics=self._usage.metrics,
            prompt_logprobs=(
                prompt_logprobs(form.tokenizer, self._item.num_tokens, output.prompt_logprobs)
                if form.params.prompt_logprobs is not None
                else None
            ),
            prompt_token_ids=form.token_ids(self._item.token_ids),
            kv_transfer_params=answered(outputs, self._id),
        )

    def choices(self, output: RequestOutput) -> list[ChatChoice]:
        """The choices of a finished conversation, whose tokens have been counted."""
        return [self._choice(choice) for choice in output.outputs]

    async def events(self, deltas: AsyncIterator[PromptDelta]) -> AsyncIterator[bytes]:
        """Each choice's role first, which counts no token, then its text."""
        policy = self._form.chunk_policy
        choices = [self._parts(index) for index in range(self._form.params.n)]
        tokens = [self._told_tokens() for _ in choices]
        has_begun = False
        async for _, delta in deltas:
            if not has_begun:
                has_begun = True
                self._usage.note_prompt(0, delta)
                for index in range(self._form.params.n):
                    yield event(self._first_chunk(index, policy.usage(self._usage)))
            self._usage.add(0, delta)
            delta = _told(delta, tokens[delta.index])
            parts = choices[delta.index]
            new = parts.delta(delta.text, is_last=delta.finish_reason is not None)
            if policy.sends(delta, has_text=new is not None):
                usage = policy.usage(self._usage)
                yield await written(delta, partial(self._event, delta, new, parts, usage))
        if policy.include_usage:
            yield event(self._last_chunk())

    def _parts(self, index: int) -> ChoiceParts:
        return ChoiceParts(self._form.answer, self._call_ids, self._item.ending, index)

    def _told_tokens(self) -> ToldTokens | None:
        return self._form.told_tokens(self._item.ending, self._usage)

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        parts = self._parts(choice.index)
        told = _told(choice.delta, self._told_tokens())
        return ChatChoice(
            index=choice.index,
            message=parts.message(choice.text, self._form.echoed),
            logprobs=self._form.logprobs(told.logprobs),
            finish_reason=parts.finish_reason(choice.finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=self._form.token_ids(told.token_ids),
        )

    def _chunk_choice(
        self, delta: OutputDelta, new: Delta | None, parts: ChoiceParts
    ) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=new or Delta(content=""),
            logprobs=self._form.logprobs(delta.logprobs),
            finish_reason=parts.finish_reason(delta.finish_reason),
            stop_reason=delta.stop_reason,
            token_ids=self._form.token_ids(delta.token_ids),
        )

    def _event(
        self,
        delta: OutputDelta,
        new: Delta | None,
        parts: ChoiceParts,
        usage: Usage | UnsetType | None,
    ) -> bytes:
        return event(self._chunk([self._chunk_choice(delta, new, parts)], usage))

    def _first_chunk(self, index: int, usage: Usage | UnsetType | None) -> ChatChunk:
        delta = Delta(role=ROLE, content=self._form.echoed)
        return self._chunk(
            [ChatChunkChoice(index=index, delta=delta)],
            usage,
            self._form.token_ids(self._item.token_ids),
        )

    def _last_chunk(self) -> ChatChunk:
        last = self._chunk([], self._usage.usage)
        metrics = self._usage.metrics
        return last if metrics is None else msgspec.structs.replace(last, metrics=metrics)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType | None = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._usage.fingerprint,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )


def _told(delta: OutputDelta, tokens: ToldTokens | None) -> OutputDelta:
    return delta if tokens is None else tokens.of(delta)
