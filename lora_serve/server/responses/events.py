"""The events of a streamed response, in the order in which they come.

response.created, response.in_progress; of each item output_item.added, what is in it, and
output_item.done; at the end one of response.completed, response.incomplete and response.failed.
An answer that a call aborted ends with response.incomplete, whose response is `cancelled`: clients
know no event of that name.
"""

from __future__ import annotations

import msgspec

from lora_serve.server.http.streaming import named_event
from lora_serve.server.openai.answers import TokenLogprob
from lora_serve.server.responses.answers import OutputItem, OutputText, ReasoningPart, Response


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """sequence_number: counts a stream's events; set where they are sent."""

    sequence_number: int = 0


class Created(Event, frozen=True, kw_only=True, tag="response.created"):
    response: Response


class InProgress(Event, frozen=True, kw_only=True, tag="response.in_progress"):
    response: Response


class Completed(Event, frozen=True, kw_only=True, tag="response.completed"):
    response: Response


class Incomplete(Event, frozen=True, kw_only=True, tag="response.incomplete"):
    response: Response


class Failed(Event, frozen=True, kw_only=True, tag="response.failed"):
    response: Response


class ItemAdded(Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(Event, frozen=True, kw_only=True):
    """What happens within an item."""

    item_id: str
    output_index: int


class PartAdded(ItemEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    content_index: int = 0
    part: OutputText | ReasoningPart


class PartDone(ItemEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    content_index: int = 0
    part: OutputText | ReasoningPart


class TextDelta(ItemEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(ItemEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(ItemEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    content_index: int = 0
    delta: str


class ReasoningDone(ItemEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    content_index: int = 0
    text: str


class ArgumentsDelta(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class EventWriter:
    """Numbers the events of one stream and writes them as server-sent events."""

    def __init__(self) -> None:
        self._num_events = 0

    def write(self, event: Event) -> bytes:
        numbered = msgspec.structs.replace(event, sequence_number=self._num_events)
        self._num_events += 1
        return named_event(numbered)
