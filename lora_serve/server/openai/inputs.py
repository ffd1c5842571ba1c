"""Turns a body's prompts and messages into what the engine continues, embeddings before text.

Tokenizing runs in worker threads, so that a long prompt does not delay other requests' tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.prompts import Prompt, TokensPrompt
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.budget import Budget
from lora_serve.server.openai.fields import MAX_PROMPTS
from lora_serve.server.openai.prompt_embeds import decode_prompt_embeds
from lora_serve.server.openai.protocol import ChatMessage, CompletionBody, ConversationBody

MAX_CHOICES = 4096
MAX_CHARS_AT_ONCE = 2**22  # of all long texts; tokenizing takes up to 200 bytes a character
SMALL_TEXT_CHARS = 2**16
ENDING_CHARS = 64
NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."


@dataclass(frozen=True, slots=True)
class Input:
    """One prompt. text: as the client wrote it, None for ids and embeddings.

    ending: the last characters of a chat.
    """

    prompt: Prompt
    text: str | None = None
    ending: str = ""

    @property
    def num_tokens(self) -> int:
        return self.prompt.num_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt.token_ids


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens a prompt keeps: the last ones, or with keeps_start the first."""

    num_tokens: int
    keeps_start: bool

    def of(self, item: Input) -> Input:
        """The prompt as it goes on; its text is then no longer what the client wrote.

        Raises:
            InvalidRequestError: it has no token ids to be cut.
        """
        if item.num_tokens <= self.num_tokens:
            return item
        if not isinstance(item.prompt, TokensPrompt):
            raise InvalidRequestError(
                f"truncate_prompt_tokens {self.num_tokens} does not cut prompt_embeds, which have "
                f"{item.num_tokens} rows; send fewer",
                "truncate_prompt_tokens",
            )
        ids = item.token_ids
        kept = ids[: self.num_tokens] if self.keeps_start else ids[-self.num_tokens :]
        return Input(TokensPrompt(kept), ending="" if self.keeps_start else item.ending)


class Inputs:
    """Makes prompts of all requests' bodies; bounds how much text is worked on at once."""

    def __init__(self, engine: Engine, max_chars_at_once: int = MAX_CHARS_AT_ONCE) -> None:
        self._engine = engine
        self._texts = Budget(max_chars_at_once, "characters of text")
        self._max_token_chars: int | None = None  # until the first text

    async def from_completion(
        self, body: CompletionBody, n: int, truncation: Truncation | None = None
    ) -> list[Input]:
        """All prompts of a body, embeddings first.

        Raises:
            InvalidRequestError: none, too many, or embeddings that this server does not take.
            OverloadedError: others' texts take too long.
        """
        _check_count(len(body.prompt_embeds) + len(body.prompt), n)
        _check_embeds(self._engine, body)
        add_special_tokens = body.add_special_tokens is not False
        inputs = [await _embeds_input(self._engine, payload) for payload in body.prompt_embeds]
        for prompt in body.prompt:
            if isinstance(prompt, str):
                inputs.append(await self.from_text(prompt, add_special_tokens))
            else:
                inputs.append(Input(TokensPrompt(prompt)))
        if any(item.num_tokens == 0 for item in inputs):
            raise InvalidRequestError(NO_PROMPT, "prompt")
        return inputs if truncation is None else [truncation.of(item) for item in inputs]

    async def from_text(self, text: str, add_special_tokens: bool = True) -> Input:
        token_ids = await self._encode(text, add_special_tokens, "prompt")
        return Input(TokensPrompt(token_ids), text)

    async def from_chat(
        self,
        messages: Sequence[ChatMessage],
        body: ConversationBody,
        *,
        chat_template: str | None,
        truncation: Truncation | None = None,
    ) -> Input:
        """A conversation as the chat template writes it.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
            OverloadedError: others' texts take too long.
        """
        if body.continue_final_message and body.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; "
                "set at most one of them",
                "continue_final_message",
            )
        past = [message.past for message in messages]
        kwargs, tools = body.template_kwargs, [tool.tool.plain for tool in body.tools or ()]
        num_chars = sum(message.num_chars for message in past)
        num_chars += sum(len(json.dumps(value)) for value in (kwargs, tools) if value)
        limit = await self._max_chars()
        _check_length(num_chars, limit, "messages")
        tokenizer = self._engine.tokenizer
        source = tokenizer.template_source(chat_template)
        async with self._share(num_chars):
            text = await asyncio.to_thread(
                tokenizer.render_chat,
                [message.plain(source) for message in past],
                add_generation_prompt=body.add_generation_prompt is not False
                and not body.continue_final_message,
                continue_final_message=bool(body.continue_final_message),
                chat_template=chat_template,
                tools=tools or None,
                template_kwargs=kwargs,
                max_chars=limit,
            )
        token_ids = await self._encode(text, False, "messages")
        item = Input(TokensPrompt(token_ids), ending=text[-ENDING_CHARS:])
        return item if truncation is None else truncation.of(item)

    async def _encode(self, text: str, add_special_tokens: bool, param: str) -> tuple[int, ...]:
        _check_length(len(text), await self._max_chars(), param)
        encode = self._engine.tokenizer.encode
        async with self._share(len(text)):
            return tuple(await asyncio.to_thread(encode, text, add_special_tokens))

    async def _max_chars(self) -> int:
        """How long a text may be that can fit, however it is tokenized."""
        if self._max_token_chars is None:
            tokenizer = self._engine.tokenizer
            self._max_token_chars = await asyncio.to_thread(lambda: tokenizer.max_token_chars)
        return self._engine.model_info.max_model_len * self._max_token_chars

    def _share(self, num_chars: int) -> AbstractAsyncContextManager[None]:
        """Short texts wait for none of the long ones."""
        return self._texts.share(num_chars) if num_chars > SMALL_TEXT_CHARS else nullcontext()


def _check_count(num_prompts: int, n: int) -> None:
    if num_prompts == 0:
        raise InvalidRequestError(NO_PROMPT, "prompt")
    if num_prompts > MAX_PROMPTS or num_prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n {n} are too many; at most {MAX_PROMPTS} prompts and "
            f"{MAX_CHOICES} choices in all are allowed, send several requests",
            "prompt",
        )


def _check_length(num_chars: int, limit: int, param: str) -> None:
    if num_chars > limit:
        raise PromptTooLongError(
            f"the text has {num_chars} characters, more than the {limit} that the model's context "
            "can hold; shorten it",
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
