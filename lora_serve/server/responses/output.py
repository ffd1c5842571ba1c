"""Makes the items of an answer of its parts, and tells each step of it as an event.

A whole answer goes the same way as a streamed one; its events are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from lora_serve.chat.call_ids import CallIds
from lora_serve.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning
from lora_serve.server.openai.answers import TokenLogprob
from lora_serve.server.responses.answers import (
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningOutput,
    ReasoningPart,
)
from lora_serve.server.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)

Status = Literal["in_progress", "completed", "incomplete"]


class _OpenItem(Protocol):
    """An item that still grows."""

    def begin(self) -> list[Event]: ...

    def add(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]: ...

    def end(self, logprobs: list[TokenLogprob]) -> list[Event]:
        """All but the item itself."""

    def item(self, status: Status) -> OutputItem: ...


class Output:
    """The items of one answer. items: those that have ended."""

    def __init__(self, call_ids: CallIds, unique: str) -> None:
        """unique: a part of all items' ids, which no other answer has."""
        self.items: list[OutputItem] = []
        self._call_ids = call_ids
        self._unique = unique
        self._open: _OpenItem | None = None
        self._logprobs: list[TokenLogprob] = []  # of text that has not come yet

    def add(self, parts: Iterable[Part], logprobs: Sequence[TokenLogprob]) -> list[Event]:
        """Take what is new. logprobs: of tokens of messages; they may come before their text."""
        self._logprobs += logprobs
        events: list[Event] = []
        for part in parts:
            events += self._add(part)
        return events

    def finish(self, *, is_cut: bool) -> list[Event]:
        """End the last item; an answer without any has an empty message.

        is_cut: the answer ended before the model ended it.
        """
        events: list[Event] = []
        if self._open is None and not self.items:
            events += self._begin(_Message(self._id("msg"), self._index))
        return events + self._end("incomplete" if is_cut else "completed")

    @property
    def _index(self) -> int:
        return len(self.items)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._unique}{self._index:04x}"

    def _add(self, part: Part) -> list[Event]:
        events: list[Event] = []
        match part:
            case Reasoning(text):
                if not isinstance(self._open, _Thoughts):
                    events += self._end("completed")
                    events += self._begin(_Thoughts(self._id("rs"), self._index))
            case Content(text):
                if not isinstance(self._open, _Message):
                    events += self._end("completed")
                    events += self._begin(_Message(self._id("msg"), self._index))
            case CallBegin(index, name):
                events = self._end("completed")
                call_id = self._call_ids.id_of(0, index, name)
                return events + self._begin(_Call(self._id("fc"), self._index, call_id, name))
            case CallArguments(_, text):
                pass
        assert self._open is not None, "arguments follow the beginning of a call"
        return events + self._open.add(text, self._take_logprobs())

    def _begin(self, item: _OpenItem) -> list[Event]:
        self._open = item
        added = ItemAdded(output_index=self._index, item=item.item("in_progress"))
        return [added, *item.begin()]

    def _end(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.end(self._take_logprobs())
        item = self._open.item(status)
        events.append(ItemDone(output_index=self._index, item=item))
        self.items.append(item)
        self._open = None
        return events

    def _take_logprobs(self) -> list[TokenLogprob]:
        """What is there for the open item, if it is a message; else it waits for one."""
        if not isinstance(self._open, _Message):
            return []
        taken, self._logprobs = self._logprobs, []
        return taken


class _Message:
    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._index = item_id, index
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[Event]:
        return [PartAdded(item_id=self._id, output_index=self._index, part=OutputText(""))]

    def add(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        delta = TextDelta(item_id=self._id, output_index=self._index, delta=text, logprobs=logprobs)
        return [delta]

    def end(self, logprobs: list[TokenLogprob]) -> list[Event]:
        self._logprobs += logprobs
        part = self._part()
        done = TextDone(
            item_id=self._id, output_index=self._index, text=part.text, logprobs=self._logprobs
        )
        return [done, PartDone(item_id=self._id, output_index=self._index, part=part)]

    def item(self, status: Status) -> OutputItem:
        content = [] if status == "in_progress" else [self._part()]
        return OutputMessage(id=self._id, status=status, content=content)

    def _part(self) -> OutputText:
        return OutputText("".join(self._texts), logprobs=self._logprobs)


class _Thoughts:
    """Reasoning."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._index = item_id, index
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return [PartAdded(item_id=self._id, output_index=self._index, part=ReasoningPart(""))]

    def add(self, text: str, _: list[TokenLogprob]) -> list[Event]:
        self._texts.append(text)
        return [ReasoningDelta(item_id=self._id, output_index=self._index, delta=text)]

    def end(self, _: list[TokenLogprob]) -> list[Event]:
        text = "".join(self._texts)
        return [
            ReasoningDone(item_id=self._id, output_index=self._index, text=text),
            PartDone(item_id=self._id, output_index=self._index, part=ReasoningPart(text)),
        ]

    def item(self, status: Status) -> OutputItem:
        content = [] if status == "in_progress" else [ReasoningPart("".join(self._texts))]
        return ReasoningOutput(id=self._id, content=content, status=status)


class _Call:
    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        self._id, self._index = item_id, index
        self._call_id, self._name = call_id, name
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return []

    def add(self, text: str, _: list[TokenLogprob]) -> list[Event]:
        self._texts.append(text)
        return [ArgumentsDelta(item_id=self._id, output_index=self._index, delta=text)]

    def end(self, _: list[TokenLogprob]) -> list[Event]:
        arguments = "".join(self._texts)
        done = ArgumentsDone(
            item_id=self._id, output_index=self._index, name=self._name, arguments=arguments
        )
        return [done]

    def item(self, status: Status) -> OutputItem:
        arguments = "" if status == "in_progress" else "".join(self._texts)
        return FunctionCall(
            id=self._id,
            call_id=self._call_id,
            name=self._name,
            arguments=arguments,
            status=status,
        )
