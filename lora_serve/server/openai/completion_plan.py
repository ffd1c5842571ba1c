"""Turns a completion's body into what the engine is asked for, as `chat_plan` does a chat's.

What other routes ask of token ids goes the same way: they write it as a `CompletionBody`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from lora_serve.sampling_params import SamplingParams
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import share_of
from lora_serve.server.openai.answer_size import completion_size
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import ModelTarget
from lora_serve.server.openai.parameters import (
    DEFAULT_COMPLETION_TOKENS,
    completion_params,
    truncation,
)
from lora_serve.server.openai.protocol import CompletionBody


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A completion's body, checked and read. inputs: its prompts, each with the same params."""

    target: ModelTarget
    inputs: Sequence[Input]
    params: SamplingParams


async def plan_completion(
    context: ServerContext,
    request: Request,
    body: CompletionBody,
    *,
    default_tokens: int | None = DEFAULT_COMPLETION_TOKENS,
) -> CompletionPlan:
    """Check all of a body that can be checked before the engine is asked.

    default_tokens: the longest answer where the body sets none; None for what the context holds.

    Raises:
        InvalidRequestError: a field is out of its range, or excludes another.
        OverloadedError: others' texts take too long.
    """
    engine = context.engine
    model, vocab_size = engine.config.model, engine.model_info.vocab_size
    target = context.models.resolve(body.model)
    params = completion_params(body, context.sampling_defaults, default_tokens)
    params.verify(model.max_logprobs, vocab_size, model.max_n)
    params = params.with_num_logprobs(vocab_size)
    inputs = await context.inputs.from_completion(
        share_of(request),
        body,
        params.n,
        truncation(body, engine.model_info.max_model_len, params.max_tokens),
    )
    completion_size(body, params).check(engine, inputs, params)
    return CompletionPlan(target, inputs, params)
