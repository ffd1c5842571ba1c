"""The formats that answers to chats are read in: what flags and chat templates say."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.chat.formats import reasoning_format, require_tool_format, tool_format
from lora_serve.chat.reasoning_parsers.parser import ReasoningFormat
from lora_serve.chat.tool_parsers.parser import ToolFormat
from lora_serve.config import ServerConfig
from lora_serve.server.engine_api import Tokenizer


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
        if config.enable_auto_tool_choice:
            require_tool_format(self._own.tools)

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
