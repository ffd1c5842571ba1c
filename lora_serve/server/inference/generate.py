"""POST /inference/v1/generate: token ids in, token ids out, with their log-probabilities by id."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.outputs import OutputDelta, RequestOutput
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.context import ServerContext
from lora_serve.server.engine_api import Tokenizer
from lora_serve.server.field_names import field_names
from lora_serve.server.http.streaming import OPENAI_FORM, event
from lora_serve.server.inference.answers import (
    Generated,
    GeneratedChoice,
    GeneratedLogprob,
    GeneratedLogprobs,
    GeneratedTokenLogprobs,
)
from lora_serve.server.inference.protocol import NAMES, GenerateBody
from lora_serve.server.openai.answers import PromptLogprobs, Usage
from lora_serve.server.openai.chunks import ChunkPolicy
from lora_serve.server.openai.completion_plan import plan_completion
from lora_serve.server.openai.completions import whole_delta
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
from lora_serve.server.openai.logprobs import clamp, prompt_logprobs
from lora_serve.server.openai.protocol import CompletionBody
from lora_serve.server.openai.usage import UsageCounter
from lora_serve.step import TokenLogprobs


def generate_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        body = await context.bodies.read(request, GenerateBody)
        with field_names(NAMES):
            return await _generate(context, request, body.completion, tells_text=body.tells_text)

    return router


async def _generate(
    context: ServerContext, request: Request, body: CompletionBody, *, tells_text: bool
) -> Response:
    engine = context.engine
    plan = await plan_completion(context, request, body, default_tokens=None)
    (item,), params = plan.inputs, plan.params
    answer = GeneratedAnswer(
        engine.tokenizer,
        item,
        params,
        ChunkPolicy(body, params),
        UsageCounter(engine.model_info.fingerprint, plan.inputs),
        response_id=response_id(AnswerPrefix.TOKENS, request, body),
        model=plan.target.shown,
        tells_prompt=bool(body.return_token_ids),
        tells_text=tells_text,
    )
    generation = start_generation(context, request, body, plan.target, plan.prompts)
    return await respond(request, generation, answer, stream=bool(body.stream))


class GeneratedAnswer:
    """One body's answer, whole or in chunks."""

    stream_form = OPENAI_FORM

    def __init__(
        self,
        tokenizer: Tokenizer,
        item: Input,
        params: SamplingParams,
        policy: ChunkPolicy,
        usage: UsageCounter,
        *,
        response_id: str,
        model: str,
        tells_prompt: bool,
        tells_text: bool,
    ) -> None:
        """tells_prompt, tells_text: whether the prompt's token ids, and texts, are wanted."""
        self._tokenizer = tokenizer
        self._item = item
        self._params = params
        self._policy = policy
        self._usage = usage
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        self._tells_prompt = tells_prompt
        self._tells_text = tells_text

    def whole(self, outputs: Sequence[RequestOutput]) -> Generated:
        (output,) = outputs
        self._usage.add_output(0, output)
        choices = [self._choice(whole_delta(output, choice)) for choice in output.outputs]
        usage = self._usage
        prompt = self._of_prompt(output)
        generated = self._generated(choices, usage.fingerprint, usage.usage, prompt)
        return replace(generated, kv_transfer_params=answered(outputs, self._id))

    async def events(self, deltas: AsyncIterator[PromptDelta]) -> AsyncIterator[bytes]:
        policy, usage = self._policy, self._usage
        async for _, delta in deltas:
            usage.add(0, delta)
            has_text = self._tells_text and bool(delta.text)
            if delta.token_ids or has_text or delta.finish_reason is not None:
                told = policy.usage(usage)
                yield await written(delta, partial(self._event, delta, told))
        if policy.include_usage:
            yield event(self._generated([], usage.fingerprint, usage.usage))

    def _event(self, delta: OutputDelta, usage: Usage | UnsetType | None) -> bytes:
        fingerprint = self._usage.fingerprint_of(delta.adapter)
        return event(self._generated([self._choice(delta)], fingerprint, usage))

    def _choice(self, delta: OutputDelta) -> GeneratedChoice:
        return GeneratedChoice(
            index=delta.index,
            token_ids=list(delta.token_ids),
            text=delta.text if self._tells_text else UNSET,
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> GeneratedLogprobs | None:
        if self._params.logprobs is None:
            return None
        has_ranks = not self._params.logprob_token_ids
        return GeneratedLogprobs([_position(each, has_ranks=has_ranks) for each in positions])

    def _of_prompt(self, output: RequestOutput) -> PromptLogprobs | None:
        if self._params.prompt_logprobs is None:
            return None
        return prompt_logprobs(self._tokenizer, self._item.num_tokens, output.prompt_logprobs)

    def _generated(
        self,
        choices: list[GeneratedChoice],
        fingerprint: str,
        usage: Usage | UnsetType | None,
        of_prompt: PromptLogprobs | None = None,
    ) -> Generated:
        tells_prompt, self._tells_prompt = self._tells_prompt, False  # in the first chunk only
        return Generated(
            request_id=self._id,
            model=self._model,
            created=self._created,
            choices=choices,
            system_fingerprint=fingerprint,
            usage=usage,
            prompt_logprobs=of_prompt,
            prompt_token_ids=list(self._item.token_ids) if tells_prompt else None,
            output_mode="text" if self._tells_text else "tokens",
        )


def _position(position: TokenLogprobs, *, has_ranks: bool) -> GeneratedTokenLogprobs:
    """has_ranks: whether the alternatives are the most likely; of named ones no rank is known."""
    token_id, logprob = position.token_id, clamp(position.logprob)
    own = GeneratedLogprob(token_id, logprob, position.rank)
    others = [
        GeneratedLogprob(other, clamp(logprob), rank if has_ranks else None)
        for rank, (other, logprob) in enumerate(position.top, 1)
        if other != token_id
    ]
    return GeneratedTokenLogprobs(token_id, logprob, position.rank, [own, *others])
