"""The items of a conversation as /v1/responses has them, and the chat messages that they are.

A validator raises ValueError with words that follow the field's name, as in `openai/fields.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import PlainValidator, ValidationInfo

from lora_serve.chat.history import PastArguments
from lora_serve.server.http.body import IGNORES_UNKNOWN
from lora_serve.server.openai.fields import MAX_CONTENT_PARTS, MAX_NAME_CHARS
from lora_serve.server.openai.protocol import MAX_MESSAGES, ChatMessage
from lora_serve.server.openai.tool_fields import (
    MAX_TOOL_NAME_CHARS,
    PastCallBody,
    PastFunction,
    parse_arguments,
)

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
ITEM_BYTES = 256  # of an item in memory, besides its texts
# At most, of the value that a mark of JSON begins: CPython 3.12, with the place in its container.
PARSED_BYTES = MappingProxyType({"{": 256, "[": 96, ",": 48, '"': 32})

Json = dict[str, Any]


class _OneText:
    """An item whose memory is that of its one text."""

    __slots__ = ()

    text: str

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES + _num_bytes(self.text)


@dataclass(frozen=True, slots=True)
class TextItem(_OneText):
    """A message."""

    role: str
    text: str

    def described(self, item_id: str) -> Json:
        kind = "output_text" if self.role == "assistant" else "input_text"
        part: Json = {"type": kind, "text": self.text}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        return {
            "id": item_id,
            "type": "message",
            "role": self.role,
            "status": "completed",
            "content": [part],
        }


@dataclass(frozen=True, slots=True)
class ReasoningText(_OneText):
    """What the model thought before its next message or call."""

    text: str

    def described(self, item_id: str) -> Json:
        content = [{"type": "reasoning_text", "text": self.text}]
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content}


@dataclass(frozen=True, slots=True)
class CallItem:
    """A call of a function."""

    call_id: str
    name: str
    arguments: PastArguments

    @property
    def num_bytes(self) -> int:
        """The arguments are there as text and as an object, each value of which takes its own."""
        text = self.arguments.text
        parsed = sum(text.count(mark) * size for mark, size in PARSED_BYTES.items())
        return ITEM_BYTES + 2 * _num_bytes(text) + parsed + _num_bytes(self.name)

    def described(self, item_id: str) -> Json:
        return {
            "id": item_id,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments.text,
            "status": "completed",
        }


@dataclass(frozen=True, slots=True)
class CallOutput(_OneText):
    """What a call gave back."""

    call_id: str
    text: str

    def described(self, item_id: str) -> Json:
        return {
            "id": item_id,
            "type": "function_call_output",
            "call_id": self.call_id,
            "output": self.text,
            "status": "completed",
        }


Item = TextItem | ReasoningText | CallItem | CallOutput


def chat_messages(items: Sequence[Item], instructions: str | None) -> list[ChatMessage]:
    """The same conversation as messages of a chat.

    Instructions come first, as the system's; a developer is the system, too. Reasoning, a text and
    calls of the assistant that follow each other in this order are one message.
    """
    messages = [] if instructions is None else [_message("system", content=instructions)]
    turn = _Turn()
    for item in items:
        if isinstance(item, CallOutput | TextItem) and not _is_assistants(item):
            messages += turn.take()
        match item:
            case CallOutput(call_id, text):
                messages.append(_message("tool", content=text, tool_call_id=call_id))
            case TextItem(role, text) if not _is_assistants(item):
                role = "system" if role == "developer" else role
                messages.append(_message(role, content=text))
            case _:
                messages += turn.take() if turn.is_beyond(item) else []
                turn.add(item)
    return messages + turn.take()


class _Turn:
    """An assistant's message that still grows."""

    def __init__(self) -> None:
        self._reasoning: str | None = None
        self._text: str | None = None
        self._calls: list[PastCallBody] = []

    def is_beyond(self, item: Item) -> bool:
        """Whether an item belongs to a later message."""
        if isinstance(item, CallItem):
            return False
        has_text = self._text is not None or bool(self._calls)
        return has_text or (isinstance(item, ReasoningText) and self._reasoning is not None)

    def add(self, item: Item) -> None:
        match item:
            case ReasoningText(text):
                self._reasoning = text
            case TextItem(_, text):
                self._text = text
            case CallItem(call_id, name, arguments):
                function = PastFunction.model_construct(name=name, arguments=arguments)
                self._calls.append(PastCallBody.model_construct(id=call_id, function=function))

    def take(self) -> list[ChatMessage]:
        """The message, if there is one; the next one begins."""
        if self._reasoning is None and self._text is None and not self._calls:
            return []
        message = _message(
            "assistant",
            content=self._text,
            reasoning=self._reasoning,
            tool_calls=self._calls or None,
        )
        self._reasoning, self._text, self._calls = None, None, []
        return [message]


def _is_assistants(item: Item) -> bool:
    return isinstance(item, TextItem) and item.role == "assistant"


def _message(role: str, **fields: Any) -> ChatMessage:
    return ChatMessage.model_construct(role=role, **fields)


def parse_input(value: object, info: ValidationInfo) -> tuple[Item, ...]:
    """A text of the user, or a list of items."""
    if isinstance(value, str):
        if not value:
            raise ValueError("is empty; send a text or items")
        return (TextItem("user", value),)
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of items")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise ValueError(f"has {len(value)} items; from 1 to {MAX_MESSAGES} are allowed")
    return tuple(_Reader(index, info).item(item) for index, item in enumerate(value))


class _Reader:
    """Reads one item. info: of the body's validation, and whether it may hold unknown fields."""

    def __init__(self, index: int, info: ValidationInfo) -> None:
        self._index = index
        self._info = info
        self._takes_more = bool((info.context or {}).get(IGNORES_UNKNOWN))

    def item(self, value: object) -> Item:
        if not isinstance(value, dict):
            raise self._wrong("is no object")
        kind = value.get("type") or ("message" if "role" in value else None)
        match kind:
            case "message":
                return self._message(value)
            case "reasoning":
                return self._reasoning(value)
            case "function_call":
                return self._call(value)
            case "function_call_output":
                return self._output(value)
            case "item_reference":
                raise self._wrong("is an item_reference; send the item, or previous_response_id")
        raise self._wrong(
            f"is of type {str(kind)[:40]!r}; this server takes message, reasoning, function_call "
            "and function_call_output"
        )

    def _message(self, value: Json) -> Item:
        self._check_fields(value, {"role", "content", "phase"})
        role = value.get("role")
        if role not in ROLES:
            raise self._wrong(f"has a role that is none of {', '.join(ROLES)}")
        return TextItem(role, self._text(value, "content"))

    def _reasoning(self, value: Json) -> Item:
        self._check_fields(value, {"summary", "content", "encrypted_content"})
        if value.get("encrypted_content"):
            raise self._wrong("has encrypted_content, which this server cannot read; leave it out")
        field = "content" if value.get("content") else "summary"
        return ReasoningText(self._text(value, field) if value.get(field) else "")

    def _call(self, value: Json) -> Item:
        self._check_fields(value, {"call_id", "name", "arguments", "caller"})
        name = self._name(value, "name", MAX_TOOL_NAME_CHARS)
        try:
            arguments = parse_arguments(value.get("arguments"), self._info)
        except ValueError as error:
            raise self._wrong(f"has arguments that {error}") from None
        return CallItem(self._name(value, "call_id"), name, arguments)

    def _output(self, value: Json) -> Item:
        self._check_fields(value, {"call_id", "output", "name", "caller"})
        return CallOutput(self._name(value, "call_id"), self._text(value, "output"))

    def _name(self, value: Json, field: str, limit: int = MAX_NAME_CHARS) -> str:
        name = value.get(field)
        if not isinstance(name, str) or not 1 <= len(name) <= limit:
            raise self._wrong(f"needs a string of 1 to {limit} characters as its {field}")
        return name

    def _text(self, value: Json, field: str) -> str:
        """A text, or the texts of a list of parts, joined by newlines as those of a chat are."""
        content = value.get(field)
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise self._wrong(f"needs a text or a list of text parts as its {field}")
        if len(content) > MAX_CONTENT_PARTS:
            raise self._wrong(f"has {len(content)} parts, at most {MAX_CONTENT_PARTS} are allowed")
        return "\n".join(map(self._part_text, content))

    def _part_text(self, part: object) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise self._wrong(
                f"has a part of type {str(kind)[:40]!r}; only text parts are supported"
            )
        assert isinstance(part, dict), "what has a type is an object"
        text = part.get(field)
        if not isinstance(text, str):
            raise self._wrong(f"has a part without a string in `{field}`")
        self._check_known(part, {field, "type", "annotations", "logprobs"}, "a part")
        return text

    def _check_fields(self, value: Json, known: set[str]) -> None:
        self._check_known(value, {"type", "id", "status", *known}, "an item")

    def _check_known(self, value: Mapping[str, object], known: set[str], what: str) -> None:
        unknown = sorted(
            name for name, given in value.items() if given is not None and name not in known
        )
        if unknown and not self._takes_more:
            raise self._wrong(f"is or has {what} with unknown fields {unknown[:5]}")

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"has an item that {what}: item {self._index}")


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


InputItems = Annotated[tuple[Item, ...], PlainValidator(parse_input, str | list[dict[str, object]])]
