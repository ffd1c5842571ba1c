"""What a body of Anthropic's says, as a chat's body: the same prompt, the same settings.

Nothing is checked here that `protocol.py` or the chats' own code checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from lora_serve.chat.history import PastArguments
from lora_serve.chat.tools import Mode, ToolChoice
from lora_serve.errors import InvalidRequestError
from lora_serve.server.anthropic.protocol import (
    BlockParam,
    ConversationParams,
    MessageParam,
    MessagesBody,
    TextBlockParam,
    ThinkingParam,
)
from lora_serve.server.openai.fields import JsonObject, shared_fields
from lora_serve.server.openai.protocol import ChatBody, ChatMessage
from lora_serve.server.openai.tool_fields import PastCallBody, PastFunction

# Claude Code's first block of a system prompt: other in every request, and not meant for a model.
BILLING_HEADER = "x-anthropic-billing-header"
ERROR_PREFIX = "Error: "
OTHER_NAMES = {"response_format": "output_config.format", "stop": "stop_sequences"}  # of a chat's
SAME_FIELDS = shared_fields(
    MessagesBody, ChatBody, but={"messages", "tools", "tool_choice", "chat_template_kwargs"}
)
MODES: Mapping[str, Mode] = MappingProxyType(
    {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
)


def conversation_body(params: ConversationParams, *, late_system: bool) -> ChatBody:
    """How a conversation becomes a prompt.

    late_system: whether the chat template takes system messages after the first; otherwise they
        are told as the user's, who is next to them.
    """
    continues = params.messages[-1].role == "assistant"
    choice = params.tool_choice
    return ChatBody.model_construct(
        model=params.model,
        messages=list(_messages(params, late_system=late_system)),
        tools=[tool.body for tool in params.tools or ()] or None,
        tool_choice=None if choice is None else ToolChoice(MODES[choice.type], choice.name),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        chat_template_kwargs=_template_kwargs(params),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def generation_body(body: MessagesBody, *, late_system: bool) -> ChatBody:
    """The same, and how it is to be continued.

    Raises:
        InvalidRequestError: more tokens of thinking than of the answer.
    """
    thinking, output = body.thinking, body.output_config
    if thinking is not None and (thinking.budget_tokens or 0) >= body.max_tokens > 0:
        raise InvalidRequestError(
            f"thinking.budget_tokens {thinking.budget_tokens} must be less than max_tokens "
            f"{body.max_tokens}; lower them, or raise max_tokens",
            "thinking.budget_tokens",
        )
    return conversation_body(body, late_system=late_system).model_copy(
        update={
            **{name: getattr(body, name) for name in SAME_FIELDS},
            "stop": tuple(body.stop_sequences or ()),
            "response_format": None if output is None else output.format,
            "include_reasoning": thinking is None or thinking.display != "omitted",
        }
    )


def has_late_system(params: ConversationParams) -> bool:
    """Whether a system message follows another message."""
    return any(message.role == "system" for message in params.messages)


def _template_kwargs(params: ConversationParams) -> JsonObject:
    """What templates know of thinking and effort; what the body itself names leads."""
    kwargs = _thinking_kwargs(params.thinking)
    if params.output_config is not None and params.output_config.effort is not None:
        kwargs["reasoning_effort"] = params.output_config.effort
    return kwargs | (params.chat_template_kwargs or {})


def _thinking_kwargs(thinking: ThinkingParam | None) -> JsonObject:
    if thinking is None:
        return {}
    thinks = thinking.type != "disabled"
    kwargs: JsonObject = {"enable_thinking": thinks, "thinking": thinks}
    if thinking.budget_tokens is not None:
        kwargs["thinking_budget"] = thinking.budget_tokens
    return kwargs


def _messages(params: ConversationParams, *, late_system: bool) -> Iterator[ChatMessage]:
    system = _text(params.system or ())
    if system:
        yield ChatMessage(role="system", content=system)
    has_begun = bool(system)
    for message in params.messages:
        for told in _told(message):
            if told.role == "system" and has_begun and not late_system:
                told = ChatMessage(role="user", content=told.content)
            has_begun = True
            yield told


def _told(message: MessageParam) -> Iterator[ChatMessage]:
    if message.role == "assistant":
        yield _assistant(message.content)
    elif message.role == "system":
        if text := _text(message.content):
            yield ChatMessage(role="system", content=text)
    else:
        yield from _user(message.content)


def _user(blocks: Sequence[BlockParam]) -> Iterator[ChatMessage]:
    """Results are messages of their own; the texts between them are joined."""
    texts: list[BlockParam] = []
    for block in blocks:
        if block.type == "text":
            texts.append(block)
            continue
        if texts:
            yield ChatMessage(role="user", content=_text(texts))
            texts = []
        content = _text(block.content or ())
        yield ChatMessage(
            role="tool",
            content=f"{ERROR_PREFIX}{content}" if block.is_error else content,
            tool_call_id=block.tool_use_id,
        )
    if texts or not blocks:
        yield ChatMessage(role="user", content=_text(texts))


def _assistant(blocks: Sequence[BlockParam]) -> ChatMessage:
    """Redacted thinking is left out: it holds no text that a model could read."""
    thinking = [block.thinking or "" for block in blocks if block.type == "thinking"]
    return ChatMessage.model_construct(
        role="assistant",
        content=_text(block for block in blocks if block.type == "text"),
        reasoning_content="\n".join(thinking) if thinking else None,
        tool_calls=[_call(block) for block in blocks if block.type == "tool_use"] or None,
    )


def _call(block: BlockParam) -> PastCallBody:
    arguments = block.input or PastArguments({}, "{}")
    function = PastFunction.model_construct(name=block.name, arguments=arguments)
    return PastCallBody.model_construct(id=block.id, function=function)


def _text(blocks: Iterable[BlockParam | TextBlockParam]) -> str:
    texts = [block.text or "" for block in blocks]
    return "\n".join(text for text in texts if not text.startswith(BILLING_HEADER))
