"""Turns a chat's body into what the engine is asked for, and how its answer is read.

What other routes ask of a conversation goes the same way: they write it as a `ChatBody`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
from starlette.requests import Request

from lora_serve.chat.answer import AnswerFormat
from lora_serve.errors import InvalidRequestError
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.context import ServerContext
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.auth import share_of
from lora_serve.server.openai.answer_size import chat_size
from lora_serve.server.openai.generation import Generation, reasoning_tokens, start_generation
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.models import ModelTarget
from lora_serve.server.openai.parameters import (
    answer_tokens,
    chat_max_tokens,
    chat_params,
    chat_template,
    check_top_logprobs,
    truncation,
)
from lora_serve.server.openai.protocol import ChatBody
from lora_serve.server.openai.tool_choice import answer_format, forced_calls
from lora_serve.structured_outputs import StructuredOutput


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat's body, checked and read. item: the conversation as a prompt."""

    body: ChatBody
    target: ModelTarget
    item: Input
    params: SamplingParams
    form: AnswerFormat


async def plan_chat(
    context: ServerContext,
    request: Request,
    body: ChatBody,
    *,
    tells_whole: bool = False,
    like: ChatPlan | None = None,
) -> ChatPlan:
    """Check all of a body that can be checked before the engine is asked.

    tells_whole: a stream ends with the whole answer, too. like: a plan of the same body with other
        messages, whose settings are read and prepared for all.

    Raises:
        InvalidRequestError: a field is out of its range, or excludes another.
        OverloadedError: others' texts take too long.
    """
    engine = context.engine
    target = context.models.resolve(body.model)
    template = chat_template(body, context)
    formats = context.chat_formats.of(template)
    if body.tools:
        context.chat_formats.note_tools(formats)
    form = answer_format(
        body,
        formats,
        needs_calls=context.config.enable_auto_tool_choice,
    )
    forced = forced_calls(body, form)
    if forced is not None:
        body = body.model_copy(update={"response_format": None})
    item = await _conversation(context, request, body, template)
    if not isinstance(item.prompt, TokensPrompt):
        _check_with_embeds(body)
    params = _params(context, body, item, form, forced, like)
    if params.reasoning is not None:
        form = replace(form, grammar_waits=params.structured_outputs is not None)
    params = _checked(engine, body, params)
    in_pieces = bool(body.stream) and not tells_whole
    chat_size(body, params, stream=in_pieces).check(engine, [item], params)
    return ChatPlan(body, target, item, params, form)


def _params(
    context: ServerContext,
    body: ChatBody,
    item: Input,
    form: AnswerFormat,
    forced: StructuredOutput | None,
    like: ChatPlan | None,
) -> SamplingParams:
    """forced: the grammar of the calls that the answer must be. like: as of `plan_chat`."""
    engine, defaults = context.engine, context.sampling_defaults
    room = engine.model_info.max_model_len - item.num_tokens
    if like is not None:
        params = like.params.with_end(chat_max_tokens(body, defaults, room), None)
        reasoning = reasoning_tokens(engine, form.reasoning, item.ending, params)
        return params.with_end(params.max_tokens, reasoning)
    params = chat_params(body, defaults, room)
    if forced is not None:
        params = msgspec.structs.replace(params, structured_outputs=forced)
    reasoning = reasoning_tokens(engine, form.reasoning, item.ending, params)
    return params if reasoning is None else msgspec.structs.replace(params, reasoning=reasoning)


async def _conversation(
    context: ServerContext, request: Request, body: ChatBody, template: str | None
) -> Input:
    """The messages as a prompt, which another server may have written already.

    As in vLLM, they are written here all the same where they have embeddings, or are echoed.
    """
    share, inputs = share_of(request), context.inputs
    cut = truncation(body, context.engine.model_info.max_model_len, answer_tokens(body))
    transfer = body.kv_transfer_params
    has_embeds = any(message.embeds for message in body.messages)
    if transfer is not None and transfer.prompt_token_ids and not (has_embeds or body.echo):
        return await inputs.from_written_chat(share, transfer.prompt_token_ids, cut)
    return await inputs.from_chat(
        share, body.messages, body, chat_template=template, truncation=cut, takes_embeds=True
    )


def _checked(engine: Engine, body: ChatBody, params: SamplingParams) -> SamplingParams:
    """The params as the engine takes them.

    Raises:
        InvalidRequestError: one is out of its range.
    """
    max_logprobs, vocab_size = engine.config.model.max_logprobs, engine.model_info.vocab_size
    check_top_logprobs(body, max_logprobs, vocab_size)
    params.verify(max_logprobs, vocab_size, engine.config.model.max_n)
    return params.with_num_logprobs(vocab_size)


def _check_with_embeds(body: ChatBody) -> None:
    """Raise InvalidRequestError for what completions refuse with embeddings, too."""
    if body.echo:
        raise InvalidRequestError("Echo is unsupported with prompt embeds.", "echo")
    if body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs is not compatible with prompt embeds.", "prompt_logprobs"
        )


def start_chat(context: ServerContext, request: Request, plan: ChatPlan) -> Generation:
    """Make the engine's requests; nothing runs before the first delta is waited for."""
    return start_generation(
        context,
        request,
        plan.body,
        plan.target,
        [(plan.item, plan.params)],
        plan.form.special_tokens,
    )
