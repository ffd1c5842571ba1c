"""How answers to chats are read: what the server's flags and the chat template say, per request."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.formats import reasoning_format, tool_format
from lora_serve.chat.reasoning_parsers.parser import ReasoningFormat
from lora_serve.chat.tool_parsers.parser import ToolFormat
from lora_serve.chat.tools import ToolChoice
from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError, InvalidRequestError
from lora_serve.server.engine_api import Tokenizer
from lora_serve.server.openai.protocol import ChatBody

_REMEDY = "start the server with --tool-call-parser, or with a --chat-template that writes tools"


@dataclass(frozen=True, slots=True)
class TemplateFormats:
    """The formats of one chat template, as far as they are known."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None


class ChatFormats:
    """The formats of the server's own template and of those that requests bring."""

    def __init__(
        self, config: ServerConfig, tokenizer: Tokenizer, chat_template: str | None
    ) -> None:
        """Raise ConfigError if --enable-auto-tool-choice asks for what is not known."""
        self._config = config
        self._tokenizer = tokenizer
        self._own_template = chat_template
        self._own = self._formats(chat_template)
        if config.enable_auto_tool_choice and self._own.tools is None:
            raise ConfigError(
                "--enable-auto-tool-choice: the chat template holds no known format of tool "
                "calls; name one with --tool-call-parser"
            )

    def of(self, chat_template: str | None) -> TemplateFormats:
        """The formats of the template that a request is written with."""
        if chat_template is self._own_template:
            return self._own
        return self._formats(chat_template)

    def _formats(self, chat_template: str | None) -> TemplateFormats:
        source = self._tokenizer.template_source(chat_template)
        return TemplateFormats(
            tool_format(self._config.tool_call_parser, source),
            reasoning_format(self._config.reasoning_parser, source),
        )


def answer_format(body: ChatBody, formats: TemplateFormats) -> AnswerFormat:
    """What to look for in the answers to a body.

    Raises:
        InvalidRequestError: its tool_choice names no tool of its own, or nobody knows how this
            model calls tools.
    """
    tools = {tool.function.name: tool.tool for tool in body.tools or ()}
    choice = body.tool_choice or ToolChoice("auto")
    if choice.mode in ("required", "named") and not tools:
        raise InvalidRequestError("tool_choice needs tools, of which there are none", "tool_choice")
    if choice.mode in ("required", "named"):
        raise InvalidRequestError(
            f"tool_choice {choice.mode} is not supported by this server yet; use auto",
            "tool_choice",
        )
    if choice.name is not None and choice.name not in tools:
        raise InvalidRequestError(
            f"tool_choice names {choice.name}, which is none of the tools: "
            f"{', '.join(list(tools)[:10])}",
            "tool_choice",
        )
    if choice.mode == "auto" and tools and formats.tools is None:
        raise InvalidRequestError(
            f"the server does not know how this model writes tool calls; {_REMEDY}", "tools"
        )
    return AnswerFormat(
        reasoning=formats.reasoning,
        tools=formats.tools,
        schemas={} if choice.mode == "none" else {n: tool.schema for n, tool in tools.items()},
        must_call=choice.mode == "required",
        called=choice.name,
        include_reasoning=body.include_reasoning is not False,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
