"""POST /generate: each choice as a body of its own, in streams with all that it has so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import InvalidRequestError
from lora_serve.outputs import CompletionOutput, RequestOutput
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.context import ServerContext
from lora_serve.server.engine_api import Engine
from lora_serve.server.field_names import field_names
from lora_serve.server.http.streaming import OPENAI_FORM, event
from lora_serve.server.openai.completion_plan import CompletionPlan, plan_completion
from lora_serve.server.openai.generation import (
    MANY_LOGPROBS,
    AnswerPrefix,
    PromptDelta,
    respond,
    response_id,
    start_generation,
)
from lora_serve.server.openai.logprobs import clamp
from lora_serve.server.openai.models import system_fingerprint
from lora_serve.server.sglang.answers import (
    SglangFinish,
    SglangGenerated,
    SglangLogprob,
    SglangMeta,
)
from lora_serve.server.sglang.protocol import NAMES, SglangGenerateBody
from lora_serve.step import TokenLogprobs

DEFAULT_NEW_TOKENS = 128  # as SGLang has it
# An event tells a choice from its beginning, so a long one is told each time it has grown by a
# 256th: all its events together have at most some 256 times its bytes.
GROWTH = 256


def sglang_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        asked = await context.bodies.read(request, SglangGenerateBody)
        if (asked.text is None) == (asked.input_ids is None):
            raise InvalidRequestError("give either text or input_ids, and not both", "text")
        names = {**NAMES, "prompt": "text" if asked.text is not None else "input_ids"}
        with field_names(names):
            body = asked.completion
            plan = await plan_completion(context, request, body, default_tokens=DEFAULT_NEW_TOKENS)
            answer = SglangAnswer(
                context.engine, asked, plan, response_id(AnswerPrefix.NONE, request, body)
            )
            streamed = body.model_copy(update={"stream": asked.stream})
            generation = start_generation(context, request, streamed, plan.target, plan.prompts)
            return await respond(request, generation, answer, stream=bool(asked.stream))

    return router


class SglangAnswer:
    """One body's answer. Choice c of prompt p has the index p * n + c."""

    stream_form = OPENAI_FORM

    def __init__(
        self, engine: Engine, asked: SglangGenerateBody, plan: CompletionPlan, response_id: str
    ) -> None:
        self._tokenizer = engine.tokenizer
        self._model_fingerprint = engine.model_info.fingerprint
        self._asked = asked
        self._inputs = plan.inputs
        self._params = plan.params
        self._id = response_id
        self._is_list = asked.is_list or plan.params.n > 1

    def whole(self, outputs: Sequence[RequestOutput]) -> SglangGenerated | list[SglangGenerated]:
        answers = [
            self._generated(index, output, choice)
            for index, output in enumerate(outputs)
            for choice in output.outputs
        ]
        return answers if self._is_list else answers[0]

    async def events(self, deltas: AsyncIterator[PromptDelta]) -> AsyncIterator[bytes]:
        n = self._params.n
        outputs = [RequestOutput("", list(item.token_ids), n) for item in self._inputs]
        next_told = [[0] * n for _ in outputs]  # told once it has as many tokens
        async for index, delta in deltas:
            output = outputs[index]
            output.add(delta)
            choice = output.outputs[delta.index]
            num_tokens = len(choice.token_ids)
            if delta.finish_reason is None and num_tokens < next_told[index][delta.index]:
                continue
            next_told[index][delta.index] = num_tokens + 1 + num_tokens // GROWTH
            yield await self._event(index, output, choice)

    async def _event(self, index: int, output: RequestOutput, choice: CompletionOutput) -> bytes:
        """Written in a thread if it is so much that other tokens would wait."""
        is_large = len(choice.logprobs) + len(output.prompt_logprobs) > MANY_LOGPROBS
        if is_large:
            return await asyncio.to_thread(lambda: event(self._generated(index, output, choice)))
        return event(self._generated(index, output, choice))

    def _generated(
        self, index: int, output: RequestOutput, choice: CompletionOutput
    ) -> SglangGenerated:
        is_one_of_several = self._is_list and bool(self._asked.stream)
        return SglangGenerated(
            text=choice.text,
            output_ids=choice.token_ids,
            meta_info=self._meta(index, output, choice),
            index=index * self._params.n + choice.index if is_one_of_several else UNSET,
        )

    def _meta(self, index: int, output: RequestOutput, choice: CompletionOutput) -> SglangMeta:
        asked, times = self._asked, output.times
        scored = self._of_prompt(output) if asked.return_logprob else None
        drawn = choice.logprobs if asked.return_logprob else None
        has_top = bool(asked.top_logprobs_num)
        return SglangMeta(
            id=self._id,
            finish_reason=finish_of(choice, self._params),
            prompt_tokens=self._inputs[index].num_tokens,
            completion_tokens=len(choice.token_ids),
            cached_tokens=output.num_cached_tokens,
            weight_version=system_fingerprint(self._model_fingerprint, output.version),
            e2e_latency=times.last_token - times.arrival if times is not None else UNSET,
            input_token_logprobs=self._tokens(scored),
            output_token_logprobs=self._tokens(drawn),
            input_top_logprobs=self._tops(scored) if has_top else UNSET,
            output_top_logprobs=self._tops(drawn) if has_top else UNSET,
        )

    def _of_prompt(self, output: RequestOutput) -> list[TokenLogprobs | int]:
        """Positions from logprob_start_len on; of the first the token's id alone."""
        if not self._asked.scores_prompt:
            return []
        positions = output.prompt_logprobs
        return [output.prompt_token_ids[-1 - len(positions)], *positions]

    def _tokens(
        self, positions: Sequence[TokenLogprobs | int] | None
    ) -> list[SglangLogprob] | UnsetType:
        if positions is None:
            return UNSET
        return [
            self._logprob(None, each)
            if isinstance(each, int)
            else self._logprob(each.logprob, each.token_id)
            for each in positions
        ]

    def _tops(
        self, positions: Sequence[TokenLogprobs | int] | None
    ) -> list[list[SglangLogprob] | None] | UnsetType:
        if positions is None:
            return UNSET
        return [
            None
            if isinstance(each, int)
            else [self._logprob(logprob, token_id) for token_id, logprob in each.top]
            for each in positions
        ]

    def _logprob(self, logprob: float | None, token_id: int) -> SglangLogprob:
        has_text = bool(self._asked.return_text_in_logprobs)
        text = self._tokenizer.token_text(token_id) if has_text else None
        return (None if logprob is None else clamp(logprob), token_id, text)


def finish_of(choice: CompletionOutput, params: SamplingParams) -> SglangFinish | None:
    """Why a choice ended; an end token is what matched where nothing else did."""
    match choice.finish_reason:
        case None:
            return None
        case "stop":
            matched = choice.stop_reason
            if matched is None and choice.token_ids:
                matched = choice.token_ids[-1]
            return SglangFinish(type="stop", matched=matched)
        case "length":
            return SglangFinish(type="length", length=params.max_tokens or len(choice.token_ids))
        case _:
            return SglangFinish(type="abort", message="the request was aborted")
