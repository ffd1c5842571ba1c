"""Turns a body's prompts and messages into what the engine continues, embeddings before text.

Long prompts are tokenized in worker threads, so that they do not delay other requests' tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.prompts import (
    EmbedsPrompt,
    Prompt,
    TokensPrompt,
    verify_vocabulary,
)
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.turns import ThreadByTurns
from lora_serve.server.openai.fields import MAX_PROMPTS, TextOrTokens
from lora_serve.server.openai.mixed_chats import (
    drawn_marks,
    encode_pieces,
    mixed_prompt,
    pieces_between,
)
from lora_serve.server.openai.prompt_embeds import decode_prompt_embeds
from lora_serve.server.openai.protocol import (
    ChatMessage,
    CompletionBody,
    ConversationBody,
    EmbeddingBody,
)
from lora_serve.server.openai.text_work import TextWork

MAX_CHOICES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ENDING_CHARS = 64
NO_INPUT = "give either input, which must not be empty, or messages"
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
    """Makes prompts of all requests' bodies; bounds how much text is worked on at once.

    A `share` is whose request it is: an API key's, or "" for all callers without one.
    """

    def __init__(self, engine: Engine, texts: TextWork, own_template: str | None = None) -> None:
        """own_template: of --chat-template; what else a chat is written with is a client's."""
        self._engine = engine
        self._texts = texts
        self._own_template = own_template
        self._request_templates = ThreadByTurns("request-templates")
        self._max_token_chars: int | None = None  # until the first text

    async def from_completion(
        self, share: str, body: CompletionBody, n: int, truncation: Truncation | None = None
    ) -> list[Input]:
        """All prompts of a body, embeddings first.

        Raises:
            InvalidRequestError: none, too many, or embeddings that this server does not take.
            OverloadedError: others' texts take too long.
        """
        _check_count(len(body.prompt_embeds) + len(body.prompt), n)
        _check_embeds(self._engine, body)
        add_special_tokens = body.add_special_tokens is not False
        max_model_len = self._engine.model_info.max_model_len
        inputs = [
            Input(await self._embeds_prompt(share, payload, max_model_len))
            for payload in body.prompt_embeds
        ]
        inputs += await self._from_list(share, body.prompt, add_special_tokens, "prompt")
        if any(item.num_tokens == 0 for item in inputs):
            raise InvalidRequestError(NO_PROMPT, "prompt")
        return inputs if truncation is None else [truncation.of(item) for item in inputs]

    async def from_embedding(
        self,
        share: str,
        body: EmbeddingBody,
        *,
        chat_template: str | None,
        truncation: Truncation | None = None,
    ) -> list[Input]:
        """All inputs of a body, or its conversation, which no head of an answer ends.

        Raises:
            InvalidRequestError: none, an empty one, or both.
            OverloadedError: others' texts take too long.
        """
        if (body.messages is None) == (not body.input):
            raise InvalidRequestError(NO_INPUT, "input")
        if body.messages is not None:
            adds = bool(body.add_generation_prompt)
            chat = body.model_copy(update={"add_generation_prompt": adds})
            item = await self.from_chat(share, body.messages, chat, chat_template=chat_template)
            inputs = [item]
        else:
            adds_tokens = body.add_special_tokens is not False
            inputs = await self._from_list(share, body.input, adds_tokens, "input")
        for index, item in enumerate(inputs):
            if item.num_tokens == 0:
                raise InvalidRequestError(f"input {index} is empty; leave it out", "input")
        return inputs if truncation is None else [truncation.of(item) for item in inputs]

    async def _from_list(
        self, share: str, prompts: Sequence[TextOrTokens], add_special_tokens: bool, param: str
    ) -> list[Input]:
        is_only = len(prompts) == 1
        return [
            await self.from_text(share, prompt, add_special_tokens, param, is_only=is_only)
            if isinstance(prompt, str)
            else Input(TokensPrompt(prompt))
            for prompt in prompts
        ]

    async def from_text(
        self,
        share: str,
        text: str,
        add_special_tokens: bool = True,
        param: str = "prompt",
        *,
        is_only: bool = False,
    ) -> Input:
        """is_only: one of many short ones would hold the loop as long as all of them."""
        _check_length(len(text), await self._max_chars(), param)
        encode = partial(self._engine.tokenizer.encode, text, add_special_tokens)
        tokenize = self._texts.tokenize if is_only else self._texts.run
        token_ids = tuple(await tokenize(share, len(text), encode))
        return Input(TokensPrompt(token_ids), text)

    async def from_chat(
        self,
        share: str,
        messages: Sequence[ChatMessage],
        body: ConversationBody,
        *,
        chat_template: str | None,
        truncation: Truncation | None = None,
        takes_embeds: bool = False,
    ) -> Input:
        """A conversation as the chat template writes it.

        takes_embeds: whether embeddings may stand among its texts.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
            OverloadedError: others' texts take too long.
        """
        _check_ending(body)
        rows = await self._rows(share, messages, takes_embeds=takes_embeds)
        marks = drawn_marks(len(rows))
        limit = await self._max_chars()
        text = await self._rendered(share, messages, body, chat_template, marks, limit)
        pieces = pieces_between(text, marks)
        num_chars = sum(map(len, pieces))
        _check_length(num_chars, limit, "messages")
        encode = partial(encode_pieces, self._engine.tokenizer, pieces)
        tokenize = self._texts.tokenize if len(pieces) == 1 else self._texts.run
        token_ids = await tokenize(share, num_chars, encode)
        item = Input(mixed_prompt(token_ids, rows), ending=pieces[-1][-ENDING_CHARS:])
        return item if truncation is None else truncation.of(item)

    async def from_written_chat(
        self, share: str, token_ids: tuple[int, ...], truncation: Truncation | None
    ) -> Input:
        """A conversation that another server has written as these tokens.

        Raises:
            InvalidRequestError: one is no token of the model's.
        """
        verify_vocabulary(token_ids, self._engine.model_info.vocab_size, "kv_transfer_params")
        last = token_ids[-ENDING_CHARS:]
        decode = partial(self._engine.tokenizer.decode, last, skip_special_tokens=False)
        ending = await self._texts.run(share, len(last), decode)
        item = Input(TokensPrompt(token_ids), ending=ending[-ENDING_CHARS:])
        return item if truncation is None else truncation.of(item)

    async def _rendered(
        self,
        share: str,
        messages: Sequence[ChatMessage],
        body: ConversationBody,
        chat_template: str | None,
        marks: Sequence[str],
        limit: int,
    ) -> str:
        """The conversation's text, with marks where embeddings stand. limit: in characters."""
        next_mark = iter(marks)
        past = [message.past(next_mark) for message in messages]
        num_chars = sum(message.num_chars for message in past) + body.num_template_chars
        _check_length(num_chars, limit, "messages")
        tokenizer, continues = self._engine.tokenizer, bool(body.continue_final_message)
        source = tokenizer.template_source(chat_template)
        _check_roles(messages, source)
        kwargs, tools = body.template_kwargs, [tool.tool.plain for tool in body.tools or ()]
        is_own = chat_template is self._own_template

        def render() -> str:
            return tokenizer.render_chat(
                [message.plain(source) for message in past],
                add_generation_prompt=body.add_generation_prompt is not False and not continues,
                continue_final_message=continues,
                chat_template=chat_template,
                tools=tools or None,
                template_kwargs=kwargs,
                max_chars=limit,
                trusts_template=is_own,
            )

        if is_own:
            return await self._texts.run(share, num_chars, render)
        return await self._request_templates.run(share, render)

    async def _rows(
        self, share: str, messages: Sequence[ChatMessage], *, takes_embeds: bool
    ) -> list[EmbedsPrompt]:
        """The embeddings of all messages, in their order, no more than the context holds."""
        payloads = [payload for message in messages for payload in message.embeds]
        if not payloads:
            return []
        _check_enabled(self._engine)
        if len(payloads) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"{len(payloads)} parts with prompt_embeds are too many; at most {MAX_PROMPTS} in "
                "one conversation are allowed, join rows that follow each other",
                "messages",
            )
        if not takes_embeds:
            raise InvalidRequestError(
                "prompt_embeds are no tokens; send messages of text alone here", "messages"
            )
        rows: list[EmbedsPrompt] = []
        room = self._engine.model_info.max_model_len
        for payload in payloads:
            rows.append(await self._embeds_prompt(share, payload, room))
            room -= rows[-1].num_tokens
        return rows

    async def _embeds_prompt(self, share: str, payload: str, max_tokens: int) -> EmbedsPrompt:
        info = self._engine.model_info
        decode = partial(
            decode_prompt_embeds,
            payload,
            hidden_size=info.hidden_size,
            dtype=info.dtype,
            max_tokens=max_tokens,
        )
        return await self._texts.run(share, len(payload), decode)

    async def _max_chars(self) -> int:
        """How long a text may be that can fit, however it is tokenized."""
        if self._max_token_chars is None:
            tokenizer = self._engine.tokenizer
            self._max_token_chars = await asyncio.to_thread(lambda: tokenizer.max_token_chars)
        return self._engine.model_info.max_model_len * self._max_token_chars


def _check_ending(body: ConversationBody) -> None:
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other; "
            "set at most one of them",
            "continue_final_message",
        )


def _check_count(num_prompts: int, n: int) -> None:
    if num_prompts == 0:
        raise InvalidRequestError(NO_PROMPT, "prompt")
    if num_prompts > MAX_PROMPTS or num_prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n {n} are too many; at most {MAX_PROMPTS} prompts and "
            f"{MAX_CHOICES} choices in all are allowed, send several requests",
            "prompt",
        )


def _check_roles(messages: Sequence[ChatMessage], template: str) -> None:
    """Refuse a role that is neither OpenAI's nor one that the chat template names."""
    for index, message in enumerate(messages):
        role = message.role
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise InvalidRequestError(
                f"messages[{index}].role must be one of {', '.join(ROLES)}, or another that the "
                f"chat template names, got {role[:40]!r}",
                f"messages[{index}].role",
            )


def _check_length(num_chars: int, limit: int, param: str) -> None:
    if num_chars > limit:
        raise PromptTooLongError(
            f"the text has {num_chars} characters, more than the {limit} that the model's context "
            "can hold; shorten it",
            param,
        )


def _check_enabled(engine: Engine) -> None:
    if not engine.config.model.enable_prompt_embeds:
        raise InvalidRequestError(
            "You must set `--enable-prompt-embeds` to input `prompt_embeds`.", "prompt_embeds"
        )


def _check_embeds(engine: Engine, body: CompletionBody) -> None:
    if not body.prompt_embeds:
        return
    _check_enabled(engine)
    if body.echo:
        raise InvalidRequestError("Echo is unsupported with prompt embeds.", "echo")
    if body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs is not compatible with prompt embeds.", "prompt_logprobs"
        )
