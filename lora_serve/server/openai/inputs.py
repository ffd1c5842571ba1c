"""From a body's prompts and messages to what the engine continues. Embeddings come before text.

Tokenizing runs in worker threads, so that a long prompt does not delay other requests' tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.prompts import Prompt, TokensPrompt
from lora_serve.server.engine_api import Engine
from lora_serve.server.openai.prompt_embeds import decode_prompt_embeds
from lora_serve.server.openai.protocol import ChatMessage, CompletionBody, JsonObject

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
MAX_CHARS_PER_TOKEN = 1024  # no vocabulary has a longer token; bounds what is tokenized in vain


@dataclass(frozen=True, slots=True)
class Input:
    """One prompt. text: as the client wrote it, None for ids and embeddings."""

    prompt: Prompt
    text: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.prompt.num_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt.token_ids


async def completion_inputs(engine: Engine, body: CompletionBody, n: int) -> list[Input]:
    """All prompts of a body, embeddings first.

    Raises:
        InvalidRequestError: none, too many, or embeddings that this server does not take.
    """
    num_prompts = len(body.prompt_embeds) + len(body.prompt)
    if num_prompts == 0:
        raise InvalidRequestError(
            "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
        )
    if num_prompts > MAX_PROMPTS or num_prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n {n} are too many; at most {MAX_PROMPTS} prompts and "
            f"{MAX_CHOICES} choices in all are allowed, send several requests",
            "prompt",
        )
    _check_embeds(engine, body)
    add_special_tokens = body.add_special_tokens is not False
    inputs = [await _embeds_input(engine, payload) for payload in body.prompt_embeds]
    for prompt in body.prompt:
        if isinstance(prompt, str):
            inputs.append(await text_input(engine, prompt, add_special_tokens))
        else:
            inputs.append(Input(TokensPrompt(prompt)))
    if any(item.num_tokens == 0 for item in inputs):
        raise InvalidRequestError(
            "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
        )
    return inputs


async def text_input(engine: Engine, text: str, add_special_tokens: bool = True) -> Input:
    check_length(engine, len(text), "prompt")
    token_ids = await asyncio.to_thread(engine.tokenizer.encode, text, add_special_tokens)
    return Input(TokensPrompt(tuple(token_ids)), text)


async def chat_input(
    engine: Engine,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template: str | None,
    template_kwargs: JsonObject | None,
) -> Input:
    """A conversation as the chat template writes it.

    Raises:
        InvalidRequestError: there is no template, or it refuses these messages.
    """
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other; "
            "set at most one of them",
            "continue_final_message",
        )
    check_length(engine, sum(len(message.content or "") for message in messages), "messages")
    token_ids = await asyncio.to_thread(
        engine.tokenizer.apply_chat_template,
        [_template_message(message) for message in messages],
        add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
        continue_final_message=bool(continue_final_message),
        chat_template=chat_template,
        template_kwargs=template_kwargs,
    )
    return Input(TokensPrompt(tuple(token_ids)))


def check_length(engine: Engine, num_chars: int, param: str) -> None:
    """Refuse at once a text that cannot fit, however it is tokenized."""
    limit = engine.model_info.max_model_len * MAX_CHARS_PER_TOKEN
    if num_chars > limit:
        raise PromptTooLongError(
            f"the text has {num_chars} characters, more than the model's context of "
            f"{engine.model_info.max_model_len} tokens can hold; shorten it",
            param,
        )


def _check_embeds(engine: Engine, body: CompletionBody) -> None:
    if not body.prompt_embeds:
        return
    if not engine.config.model.enable_prompt_embeds:
        raise InvalidRequestError(
            "You must set `--enable-prompt-embeds` to input `prompt_embeds`.", "prompt_embeds"
        )
    if body.echo:
        raise InvalidRequestError("Echo is unsupported with prompt embeds.", "echo")
    if body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs is not compatible with prompt embeds.", "prompt_logprobs"
        )


async def _embeds_input(engine: Engine, payload: str) -> Input:
    info = engine.model_info
    prompt = await asyncio.to_thread(
        decode_prompt_embeds,
        payload,
        hidden_size=info.hidden_size,
        dtype=info.dtype,
        max_tokens=info.max_model_len,
    )
    return Input(prompt)


def _template_message(message: ChatMessage) -> Mapping[str, object]:
    """What templates know of a message; a name only if it has one."""
    plain: dict[str, object] = {"role": message.role, "content": message.content or ""}
    if message.name is not None:
        plain["name"] = message.name
    return plain
