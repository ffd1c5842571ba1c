"""Messages as chat templates know them: those of transformers, which drops what is None."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A template that joins a call's arguments with strings, as DeepSeek's do, where others write them
# as JSON or go through the items.
_JOINS_ARGUMENTS = re.compile(r"[+~]\s*[\w.\[\]'\"]*\barguments['\"]?\]?\s*(?:[+~]|-?\}\})")


def wants_text_arguments(template: str) -> bool:
    """Whether a template takes a call's arguments as text instead of an object."""
    return _JOINS_ARGUMENTS.search(template) is not None


@dataclass(frozen=True, slots=True)
class PastArguments:
    """A call's arguments: an object, and the text that was sent for it."""

    value: Mapping[str, object]
    text: str


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call in an assistant's message."""

    name: str
    arguments: PastArguments
    id: str | None = None

    def plain(self, *, with_text: bool) -> dict[str, object]:
        arguments = self.arguments.text if with_text else self.arguments.value
        call: dict[str, object] = {"type": "function"}
        if self.id is not None:
            call["id"] = self.id
        return {**call, "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class PastMessage:
    """A message of the conversation so far."""

    role: str
    content: str | None = None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: Sequence[PastCall] = ()
    tool_call_id: str | None = None

    @property
    def num_chars(self) -> int:
        texts = (self.role, self.content, self.name, self.reasoning, self.tool_call_id)
        calls = sum(len(c.name) + len(c.arguments.text) + len(c.id or "") for c in self.tool_calls)
        return sum(len(text or "") for text in texts) + calls

    def plain(self, template: str) -> dict[str, object]:
        """The message for `template`, with what it has; its content may be empty."""
        message: dict[str, object] = {"role": self.role, "content": self.content or ""}
        if self.tool_calls:
            with_text = wants_text_arguments(template)
            message["tool_calls"] = [call.plain(with_text=with_text) for call in self.tool_calls]
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message
