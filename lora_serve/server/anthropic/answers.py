"""Bodies of answers and of events, as Anthropic's clients read them."""

from __future__ import annotations

import msgspec


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every status above 399."""

    type: str
    error: AnthropicErrorDetail
    request_id: str


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt has as many tokens as the three inputs together. Caching costs nothing here."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """signature: a digest of the text; clients send back thinking that has one."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """input: an object, as the model wrote it."""

    id: str
    name: str
    input: msgspec.Raw


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An answer; with nothing in it, the beginning of a stream."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    system_fingerprint: str


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class BlockPiece(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct, frozen=True):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


BlockEvent = BlockStart | BlockPiece | BlockStop
Event = MessageStart | Ping | BlockEvent | MessageDelta | MessageStop
