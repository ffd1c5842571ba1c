"""The formats that answers to chats are read in: what flags and chat templates say."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lora_serve.chat.formats import reasoning_format, require_tool_format, tool_format
from lora_serve.chat.reasoning_parsers.parser import ReasoningFormat
from lora_serve.chat.tool_parsers.parser import ToolFormat
from lora_serve.config import ServerConfig
from lora_serve.server.engine_api import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TemplateFormats:
    """The formats of one chat template, as far as they are known.

    writes_tools: whether it tells the model of the tools that it may call.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    writes_tools: bool = True


class ChatFormats:
    """The formats of the server's own template and of those that requests bring."""

    def __init__(
        self, config: ServerConfig, tokenizer: Tokenizer, chat_template: str | None
    ) -> None:
        """Raise ConfigError if --enable-auto-tool-choice asks for what is not known."""
        self._config = config
        self._tokenizer = tokenizer
        self._own_template = chat_template
        self._has_warned = False
        self._own = self._formats(chat_template)
        if config.enable_auto_tool_choice:
            require_tool_format(self._own.tools)

    def of(self, chat_template: str | None) -> TemplateFormats:
        """The formats of the template that a request is written with."""
        if chat_template is self._own_template:
            return self._own
        return self._formats(chat_template)

    def note_tools(self, formats: TemplateFormats) -> None:
        """Warn, once, that the model learns nothing of the tools that requests give it."""
        if not (formats.writes_tools or self._has_warned):
            self._has_warned = True
            logger.warning(
                "a request has tools, and the chat template writes none: the model does not see "
                "them; give one that does with --chat-template"
            )

    def _formats(self, chat_template: str | None) -> TemplateFormats:
        source = self._tokenizer.template_source(chat_template)
        return TemplateFormats(
            tool_format(self._config.tool_call_parser, source),
            reasoning_format(self._config.reasoning_parser, source),
            writes_tools="tools" in source,
        )
