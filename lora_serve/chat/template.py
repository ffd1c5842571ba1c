"""Renders messages as the text that a model was trained to continue.

Templates are programs of the model's author or of the operator; they run in a sandbox.
Whatever they raise is about the messages that they were given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from jinja2 import TemplateSyntaxError

from lora_serve.chat.continuation import cut_at_mark, mark_last
from lora_serve.chat.model_template import ModelTemplate
from lora_serve.chat.sandbox import compiled
from lora_serve.chat.template_data import plain, plain_messages
from lora_serve.chat.template_memory import (
    CHAR_BYTES,
    MAX_BYTES,
    TemplateMemoryError,
    charge_value,
    need,
    within_memory,
)
from lora_serve.chat.template_time import TemplateTimeError, at_most
from lora_serve.errors import ConfigError, InvalidRequestError, PromptTooLongError

# What is said by fields of a request, or not at all: its chat_template_kwargs must not set them.
# Those that transformers' own rendering takes are among them, so that nothing means two things.
_RESERVED_NAMES = frozenset(
    {
        *("self", "conversation", "messages", "tools", "chat_template", "kwargs"),
        *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)

_MOST_TOLD_CHARS = 400  # of what a template raises

_max_chars: ContextVar[int | None] = ContextVar("_max_chars", default=None)  # of this rendering


def check_template(source: str) -> None:
    """Raise for a text that is no template.

    Raises:
        ConfigError: naming the line.
    """
    try:
        compiled(source, _join_within_limit)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"--chat-template: line {error.lineno} is no Jinja: {error.message}"
        ) from error


def render_chat(
    template: ModelTemplate,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template: str | None,
    tools: Sequence[Mapping[str, object]] | None,
    template_kwargs: Mapping[str, object],
    max_chars: int | None = None,
    max_seconds: float | None = None,
) -> str:
    """The conversation as text, with all special tokens written out.

    Args:
        template: the model's.
        chat_template: instead of the model's own.
        template_kwargs: further variables for the template.
        max_chars: after which rendering stops, since a template may repeat what it is given.
        max_seconds: of processor time, after which it stops, too.

    Raises:
        InvalidRequestError: there is no template, it is none, it refuses these messages, or takes
            longer.
        PromptTooLongError: the text is longer than max_chars.
    """
    if chat_template is None and not template.own:
        raise InvalidRequestError(
            "the model has no chat template; start the server with --chat-template, "
            "or use /v1/completions",
            "messages",
        )
    _check_names(template_kwargs)
    with _rendering_within(max_chars), at_most(max_seconds), within_memory(MAX_BYTES):
        source = template.source(chat_template, has_tools=tools is not None)
        program = compiled(source, _join_within_limit)
        if not messages:
            raise ValueError("there are no messages")
        if continue_final_message and add_generation_prompt:
            raise ValueError("an answer either continues the final message or begins a new one")
        shown = plain_messages(messages)
        text = mark_last(shown, source) if continue_final_message else None
        variables = {**template.special_tokens, "documents": None, **template_kwargs}
        rendered = program.render(
            {
                **{name: plain(value) for name, value in variables.items()},
                "messages": shown,
                "tools": None if tools is None else plain(list(tools)),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return rendered if text is None else cut_at_mark(rendered, text)


@contextmanager
def _rendering_within(max_chars: int | None) -> Iterator[None]:
    """Stop a template at max_chars, and raise what it raises as InvalidRequestError."""
    limit = _max_chars.set(max_chars)
    try:
        yield
    except (PromptTooLongError, TemplateTimeError, TemplateMemoryError):
        raise
    except TemplateSyntaxError as error:  # the model's own and the operator's were read before
        raise InvalidRequestError(
            f"chat_template: line {error.lineno} is no Jinja: {error.message}; correct it",
            "chat_template",
        ) from error
    except Exception as error:  # a template can raise anything: it is a program
        told = str(error)[:_MOST_TOLD_CHARS] or type(error).__name__
        raise InvalidRequestError(
            f"the chat template refused the messages: {told}", "messages"
        ) from error
    finally:
        _max_chars.reset(limit)


def _check_names(template_kwargs: Mapping[str, object]) -> None:
    reserved = sorted(_RESERVED_NAMES.intersection(template_kwargs))
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {', '.join(reserved)}; use the request's own field",
            "chat_template_kwargs",
        )


def _join_within_limit(pieces: Iterable[str]) -> str:
    """What Jinja joins the pieces of a rendered text with."""
    limit, num_chars, taken = _max_chars.get(), 0, []
    for piece in pieces:
        num_chars += len(piece)
        if limit is not None and num_chars > limit:
            raise PromptTooLongError(
                f"the chat template writes more than {limit} characters, the most that the model's "
                "context can hold; send fewer or shorter messages",
                "messages",
            )
        taken.append(piece)
    need(CHAR_BYTES * num_chars)
    text = "".join(taken)
    charge_value(text)
    return text
