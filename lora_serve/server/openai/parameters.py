"""Turns a body's fields into SamplingParams: the only place that converts and defaults them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from lora_serve.config import ServerConfig
from lora_serve.errors import InvalidRequestError
from lora_serve.sampling_params import SamplingParams, verify_num_logprobs
from lora_serve.server.context import ServerContext
from lora_serve.server.openai.inputs import Truncation
from lora_serve.server.openai.protocol import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    ScheduledBody,
)
from lora_serve.server.openai.sampling_fields import GenerationFields

DEFAULT_COMPLETION_TOKENS = 16
CONSTRAINT_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
SAME_FIELDS = GenerationFields.model_fields.keys() & set(SamplingParams.__struct_fields__)
UNIQUE_FIELDS = ("stop_token_ids", "logprob_token_ids", "bad_words")  # told twice, they count once

T = TypeVar("T")


def completion_params(
    body: CompletionBody, defaults: Mapping[str, float], default_tokens: int | None
) -> SamplingParams:
    """Read a completion's parameters; an echo with logprobs asks for the prompt's too.

    default_tokens: the longest answer where the body sets none; None for what the context holds.
    """
    if body.best_of is not None and body.best_of != _or(body.n, 1):
        raise InvalidRequestError(
            f"best_of {body.best_of} must equal n {_or(body.n, 1)}; leave it out", "best_of"
        )
    prompt_logprobs = body.prompt_logprobs
    if body.echo and prompt_logprobs is None:
        prompt_logprobs = body.logprobs
    return _params(
        body,
        defaults,
        max_tokens=_or(body.max_tokens, default_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def chat_params(body: ChatBody, defaults: Mapping[str, float], room: int) -> SamplingParams:
    """Read a chat's parameters. Without max_tokens the model's default or its context is the limit.

    room: tokens that the context holds after the prompt; bounds that default, but no wish.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    return _params(
        body,
        defaults,
        max_tokens=chat_max_tokens(body, defaults, room),
        logprobs=_or(body.top_logprobs, 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def chat_max_tokens(body: ChatBody, defaults: Mapping[str, float], room: int) -> int | None:
    """How long a chat's answer may be; None for as long as its context allows."""
    max_tokens = answer_tokens(body)
    if max_tokens is None and "max_tokens" in defaults:
        return max(1, min(int(defaults["max_tokens"]), room))
    return max_tokens


def check_top_logprobs(body: ChatBody, max_logprobs: int, vocab_size: int) -> None:
    """Raise InvalidRequestError by a chat's own name for the number, which is not `logprobs`."""
    verify_num_logprobs("top_logprobs", body.top_logprobs, max_logprobs, vocab_size)


def answer_tokens(body: ChatBody) -> int | None:
    """How long a chat's answer may be, as far as its body says so."""
    return _or(body.max_completion_tokens, body.max_tokens)


def tokens_as_ids(body: GenerationBody, config: ServerConfig) -> bool:
    """Whether logprobs name tokens by their ids."""
    return _or(body.return_tokens_as_token_ids, config.return_tokens_as_token_ids)


def chat_template(body: ChatBody | EmbeddingBody, context: ServerContext) -> str | None:
    """The template to write a chat with; None for the tokenizer's own.

    Raises:
        InvalidRequestError: the request brings one, and this server trusts none.
    """
    if body.chat_template is None:
        return context.chat_template
    if not context.config.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template is a program of the client's, and this server was started without "
            "--trust-request-chat-template; leave it out",
            "chat_template",
        )
    return body.chat_template


def truncation(
    body: ScheduledBody, max_model_len: int, max_tokens: int | None
) -> Truncation | None:
    """What the body asks to leave of a prompt; -1 for as much as fits with the answer.

    Raises:
        InvalidRequestError: nothing, or more than the context holds.
    """
    num_tokens = body.truncate_prompt_tokens
    if num_tokens is None:
        return None
    if num_tokens == -1:
        num_tokens = max(1, max_model_len - _or(max_tokens, 1))
    if not 1 <= num_tokens <= max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be in [1, {max_model_len}], or -1 for as much as fits, "
            f"got {num_tokens}",
            "truncate_prompt_tokens",
        )
    return Truncation(num_tokens, keeps_start=body.truncation_side == "right")


def _params(
    body: GenerationBody,
    defaults: Mapping[str, float],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """A setting is the body's, else the model's own default, else OpenAI's."""
    _check_stream(body)
    field = constraint_field(body)
    given = {name: getattr(body, name) for name in SAME_FIELDS}
    settings: dict[str, Any] = {
        **defaults,
        **{name: value for name, value in given.items() if value is not None},
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "structured_outputs": None if field is None else getattr(body, field),
    }
    settings["top_k"] = int(settings.get("top_k", 0))  # a model's file may say 50.0
    for name in UNIQUE_FIELDS:
        settings[name] = tuple(dict.fromkeys(settings.get(name, ())))
    return SamplingParams(**settings)


def constraint_field(body: GenerationBody) -> str | None:
    """The field that says what the answer must match, if one does.

    Raises:
        InvalidRequestError: several do.
    """
    given = [name for name in CONSTRAINT_FIELDS if getattr(body, name) is not None]
    if len(given) > 1:
        raise InvalidRequestError(
            f"{' and '.join(given)} exclude each other; give one of them", given[1]
        )
    return given[0] if given else None


def _check_stream(body: GenerationBody) -> None:
    options = body.stream_options
    if options is not None and options.model_fields_set and not body.stream:
        raise InvalidRequestError(
            "stream_options needs stream to be true; set it, or leave stream_options out",
            "stream_options",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError(
            "prompt_logprobs are not available with stream", "prompt_logprobs"
        )


def _or(value: T | None, default: T) -> T:
    return value if value is not None else default
