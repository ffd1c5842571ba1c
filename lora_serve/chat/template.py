"""Renders messages as the text that a model was trained to continue.

Templates are programs of the model's author or of the operator; they run in transformers' sandbox.
Whatever they raise is about the messages that they were given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from lora_serve.chat.template_time import TemplateTimeError, at_most, watch_loops
from lora_serve.errors import ConfigError, InvalidRequestError, PromptTooLongError

# Arguments of transformers' own, which a request's chat_template_kwargs must not reach.
_RESERVED_NAMES = frozenset(
    inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
) - {"documents"}

_MOST_TOLD_CHARS = 400  # of what a template raises

_max_chars: ContextVar[int | None] = ContextVar("_max_chars", default=None)  # of this rendering


def check_template(source: str) -> None:
    """Raise for a text that is no template.

    Raises:
        ConfigError: naming the line.
    """
    try:
        _compile_jinja_template(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"--chat-template: line {error.lineno} is no Jinja: {error.message}"
        ) from error


def render_chat(
    tokenizer: PreTrainedTokenizerFast,
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
        chat_template: instead of the tokenizer's own.
        template_kwargs: further variables for the template.
        max_chars: after which rendering stops, since a template may repeat what it is given.
        max_seconds: of processor time, after which it stops, too.

    Raises:
        InvalidRequestError: there is no template, it is none, it refuses these messages, or takes
            longer.
        PromptTooLongError: the text is longer than max_chars.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise InvalidRequestError(
            "the model has no chat template; start the server with --chat-template, "
            "or use /v1/completions",
            "messages",
        )
    _check_names(template_kwargs)
    # cast: its annotations forbid message contents that are lists, and say nothing of `tokenize`
    render = cast(Callable[..., str], tokenizer.apply_chat_template)
    plain_tools = None if tools is None else [dict(tool) for tool in tools]
    with _rendering_within(max_chars):
        source = tokenizer.get_chat_template(chat_template, plain_tools)
        compiled = _compile_jinja_template(source)
        compiled.environment.concat = _join_within_limit
        if max_seconds is not None:
            watch_loops(compiled, source)
        with at_most(max_seconds):
            return render(
                [dict(message) for message in messages],
                tools=plain_tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_kwargs,
            )


@contextmanager
def _rendering_within(max_chars: int | None) -> Iterator[None]:
    """Stop a template at max_chars, and raise what it raises as InvalidRequestError."""
    limit = _max_chars.set(max_chars)
    try:
        yield
    except (PromptTooLongError, TemplateTimeError):
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
    return "".join(taken)
