"""An answer's text as content blocks: in pieces, each of which is an event, or whole.

A whole answer's blocks are put together from the events of its stream, so both tell the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.call_ids import CallIds
from lora_serve.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning
from lora_serve.server.anthropic.answers import (
    BlockDelta,
    BlockEvent,
    BlockPiece,
    BlockStart,
    BlockStop,
    ContentBlock,
    Ending,
    InputDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)

NO_INPUT = msgspec.Raw(b"{}")
REASONS = {"length": "max_tokens", "stop": "end_turn"}


class BlockWriter:
    """One answer. A block is open until another kind of part comes, or the end."""

    def __init__(self, form: AnswerFormat, ids: CallIds, prompt_ending: str) -> None:
        self._parser = form.parser(prompt_ending)
        self._ids = ids
        self._index = -1
        self._open: ContentBlock | None = None
        self._thought = hashlib.sha256()  # of the open block
        self._arguments: list[str] = []  # of the last call
        self._has_calls = False

    def write(self, text: str, *, is_last: bool) -> Iterator[BlockEvent]:
        """The events of the next piece of text."""
        parts = self._parser.feed(text)
        if is_last:
            parts += self._parser.finish()
        for part in parts:
            yield from self._begin(part)
            if (piece := self._piece(part)) is not None:
                yield BlockPiece(self._index, piece)
        if is_last:
            yield from self._stop()

    def ending(self, finish_reason: str | None, stop_reason: str | int | None) -> Ending:
        """Why the answer ended. A call that a stop sequence cut in two is none to be made."""
        if finish_reason != "stop":
            return Ending(REASONS.get(finish_reason or ""), None)
        is_complete = self._has_calls and _is_object("".join(self._arguments))
        if isinstance(stop_reason, str) and not is_complete:
            return Ending("stop_sequence", stop_reason)
        return Ending("tool_use" if self._has_calls else "end_turn", None)

    def _begin(self, part: Part) -> Iterator[BlockEvent]:
        """Begin the block that a part belongs to, unless it is open."""
        match part, self._open:
            case (Content(), TextBlock()) | (Reasoning(), ThinkingBlock()):
                return
            case CallArguments(), _:
                return
            case Content(), _:
                block: ContentBlock = TextBlock("")
            case Reasoning(), _:
                block = ThinkingBlock("", "")
            case CallBegin(index, name), _:
                block = ToolUseBlock(self._ids.id_of(0, index, name), name, NO_INPUT)
                self._has_calls, self._arguments = True, []
        yield from self._stop()
        self._open, self._index = block, self._index + 1
        yield BlockStart(self._index, block)

    def _piece(self, part: Part) -> BlockDelta | None:
        match part:
            case Content(text):
                return TextDelta(text)
            case Reasoning(text):
                self._thought.update(text.encode("utf-8", "surrogatepass"))
                return ThinkingDelta(text)
            case CallArguments(_, text):
                self._arguments.append(text)
                return InputDelta(text)
            case CallBegin():
                return None

    def _stop(self) -> Iterator[BlockEvent]:
        if isinstance(self._open, ThinkingBlock):
            yield BlockPiece(self._index, SignatureDelta(self._thought.hexdigest()))
            self._thought = hashlib.sha256()
        if self._open is not None:
            yield BlockStop(self._index)
        self._open = None


def whole_blocks(events: Iterable[BlockEvent]) -> list[ContentBlock]:
    """The blocks that a client puts together from all events of an answer."""
    blocks: list[ContentBlock] = []
    pieces: list[str] = []
    signature = ""
    for event in events:
        match event:
            case BlockStart(_, block):
                blocks.append(block)
                pieces = []
            case BlockPiece(_, SignatureDelta(signature)):
                pass
            case BlockPiece(_, TextDelta(text) | ThinkingDelta(text) | InputDelta(text)):
                pieces.append(text)
            case BlockStop():
                blocks[-1] = _with_text(blocks[-1], "".join(pieces), signature)
    return blocks


def _with_text(block: ContentBlock, text: str, signature: str) -> ContentBlock:
    match block:
        case TextBlock():
            return TextBlock(text)
        case ThinkingBlock():
            return ThinkingBlock(text, signature)
        case ToolUseBlock(call_id, name, _):
            given = msgspec.Raw(text.encode()) if _is_object(text) else NO_INPUT
            return ToolUseBlock(call_id, name, given)


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
    return True
