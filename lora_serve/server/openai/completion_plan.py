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
from lora_serve.server.openai.generation import reasoning_tokens
from lora_serve.server.openai.inputs import ENDING_CHARS, Input
from lora_serve.server.openai.models import ModelTarget
from lora_serve.server.openai.parameters import (
    DEFAULT_COMPLETION_TOKENS,
    completion_params,
    truncation,
)
from lora_serve.server.openai.protocol import CompletionBody
from lora_serve.structured_outputs import ReasoningTokens


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A completion's body, checked and read. inputs: its prompts, each with the same params.

    reasoning: how their answers mark it, where it has a budget.
    """

    target: ModelTarget
    inputs: Sequence[Input]
    params: SamplingParams
    reasoning: Sequence[ReasoningTokens | None]

    @property
    def prompts(self) -> list[tuple[Input, SamplingParams]]:
        """What the engine is asked."""
        pairs = zip(self.inputs, self.reasoning, strict=True)
        return [
            (item, self.params.with_end(self.params.max_tokens, marks)) for item, marks in pairs
        ]


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
    marks = [_reasoning(context, params, item) for item in inputs]
    return CompletionPlan(target, inputs, params, marks)


def _reasoning(
    context: ServerContext, params: SamplingParams, item: Input
) -> ReasoningTokens | None:
    """What marks the reasoning behind a prompt; None where it has no budget.

    A grammar holds a completion from its first token on.
    """
    form = context.chat_formats.of(context.chat_template).reasoning
    if form is None or not params.needs_reasoning(grammars_wait=False):
        return None
    engine = context.engine
    ending = engine.tokenizer.decode(item.token_ids[-ENDING_CHARS:], skip_special_tokens=False)
    return reasoning_tokens(engine, form, ending, params)
