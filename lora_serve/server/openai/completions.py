"""POST /v1/completions. A whole answer is written as one large delta, so both ways are one code."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from fastapi import APIRouter
from msgspec import UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.outputs import CompletionOutput, OutputDelta, RequestOutput
from lora_serve.server.context import ServerContext
from lora_serve.server.http.streaming import OPENAI_FORM, event
from lora_serve.server.openai.answer_form import AnswerForm
from lora_serve.server.openai.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    RequestMetrics,
    Usage,
)
from lora_serve.server.openai.completion_plan import plan_completion
from lora_serve.server.openai.generation import (
    AnswerPrefix,
    PromptDelta,
    respond,
    response_id,
    start_generation,
    written,
)
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.kv_transfer import answered
from lora_serve.server.openai.logprobs import CompletionLogprobsWriter, joined, prompt_logprobs
from lora_serve.server.openai.protocol import CompletionBody
from lora_serve.server.openai.usage import UsageCounter


def completions_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await context.bodies.read(
            request,
            CompletionBody,
            takes_embeds=context.engine.config.model.enable_prompt_embeds,
        )
        return await answer_completion(context, request, body)

    return router


async def answer_completion(
    context: ServerContext, request: Request, body: CompletionBody
) -> Response:
    engine = context.engine
    plan = await plan_completion(context, request, body)
    inputs, params = plan.inputs, plan.params
    answer = CompletionAnswer(
        CompletionForm(engine.tokenizer, body, params, context.config),
        inputs,
        UsageCounter(
            engine.model_info.fingerprint,
            inputs,
            tells_times=context.config.enable_per_request_metrics,
        ),
        response_id=response_id(AnswerPrefix.COMPLETION, request, body),
        model=plan.target.shown,
    )
    generation = start_generation(context, request, body, plan.target, plan.prompts)
    return await respond(request, generation, answer, stream=bool(body.stream))


class CompletionForm(AnswerForm[CompletionBody]):
    """Nothing beyond what chats have, too."""


class ChoiceWriter:
    """One choice, delta by delta; the first one brings what belongs to the prompt."""

    def __init__(self, form: CompletionForm, item: Input, index: int) -> None:
        self._form = form
        self._item = item
        self._index = index
        self._is_first = True
        self._logprobs = CompletionLogprobsWriter(
            form.tokenizer,
            skip_special_tokens=form.params.skip_special_tokens,
            tokens_as_ids=form.tokens_as_ids,
        )

    def write(self, delta: OutputDelta) -> CompletionChoice:
        is_first, self._is_first = self._is_first, False
        body = self._form.body
        echoed = self._prompt_text() if is_first and body.echo else None
        return CompletionChoice(
            index=self._index,
            text=(echoed or "") + delta.text,
            logprobs=self._write_logprobs(delta, echoed),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_logprobs=self._prompt_logprobs(delta) if is_first else None,
            token_ids=self._form.token_ids(delta.token_ids),
            prompt_token_ids=self._form.token_ids(self._item.token_ids) if is_first else None,
        )

    def _prompt_text(self) -> str:
        if self._item.text is not None:
            return self._item.text
        return self._form.tokenizer.decode(self._item.token_ids, skip_special_tokens=False)

    def _write_logprobs(self, delta: OutputDelta, echoed: str | None) -> CompletionLogprobs | None:
        if self._form.params.logprobs is None:
            return None
        if echoed is None:
            return self._logprobs.write(delta.logprobs)
        prompt = self._logprobs.write_prompt(self._item.token_ids, delta.prompt_logprobs, echoed)
        return joined(prompt, self._logprobs.write(delta.logprobs))

    def _prompt_logprobs(self, delta: OutputDelta) -> PromptLogprobs | None:
        if self._form.body.prompt_logprobs is None:
            return None
        return prompt_logprobs(self._form.tokenizer, self._item.num_tokens, delta.prompt_logprobs)


class CompletionAnswer:
    """One body's answer. Choice c of prompt p has the index p * n + c."""

    stream_form = OPENAI_FORM

    def __init__(
        self,
        form: CompletionForm,
        inputs: Sequence[Input],
        usage: UsageCounter,
        *,
        response_id: str,
        model: str,
    ) -> None:
        self._form = form
        self._usage = usage
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        self._n = form.params.n
        self._writers = [
            ChoiceWriter(form, item, prompt_index * self._n + choice_index)
            for prompt_index, item in enumerate(inputs)
            for choice_index in range(self._n)
        ]

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._usage.add_output(prompt_index, output)
            for choice in output.outputs:
                writer = self._writers[prompt_index * self._n + choice.index]
                choices.append(writer.write(whole_delta(output, choice)))
        usage = self._usage
        completion = self._completion(choices, usage.fingerprint, usage.usage, usage.metrics)
        return replace(completion, kv_transfer_params=answered(outputs, self._id))

    async def events(self, deltas: AsyncIterator[PromptDelta]) -> AsyncIterator[bytes]:
        policy = self._form.chunk_policy
        async for prompt_index, delta in deltas:
            self._usage.add(prompt_index, delta)
            if policy.sends(delta, has_text=bool(delta.text)):
                index = prompt_index * self._n + delta.index
                usage = policy.usage(self._usage)
                yield await written(delta, partial(self._event, index, delta, usage))
        if policy.include_usage:
            last = self._usage
            yield event(self._completion([], last.fingerprint, last.usage, last.metrics))

    def _event(self, index: int, delta: OutputDelta, usage: Usage | UnsetType | None) -> bytes:
        choice = self._writers[index].write(delta)
        return event(self._completion([choice], self._usage.fingerprint_of(delta.adapter), usage))

    def _completion(
        self,
        choices: list[CompletionChoice],
        fingerprint: str,
        usage: Usage | UnsetType | None,
        metrics: RequestMetrics | None = None,
    ) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=fingerprint,
            usage=usage,
            metrics=metrics,
        )


def whole_delta(output: RequestOutput, choice: CompletionOutput) -> OutputDelta:
    """A finished choice as if it had come at once."""
    return OutputDelta(
        index=choice.index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(choice.logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        prompt_logprobs=tuple(output.prompt_logprobs),
    )
