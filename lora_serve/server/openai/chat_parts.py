"""One choice of a chat's answer: its text's parts as OpenAI's fields."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.call_ids import CallIds
from lora_serve.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning
from lora_serve.server.openai.answers import (
    Delta,
    FunctionDelta,
    Message,
    ToolCall,
    ToolCallDelta,
    ToolFunction,
)

ROLE = "assistant"


class ChoiceParts:
    """Takes one choice's text, in pieces or whole.

    ending: of the prompt, which says whether the answer begins within reasoning.
    """

    def __init__(self, form: AnswerFormat, ids: CallIds, ending: str, choice: int) -> None:
        self._form = form
        self._ids = ids
        self._choice = choice
        self._parser = form.parser(ending)
        self._has_calls = False

    def delta(self, text: str, *, is_last: bool) -> Delta | None:
        """What the next piece of text adds to the message; None if nothing is certain yet."""
        parts = self._parts(text, is_last)
        if not parts:
            return None
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        content = "".join(part.text for part in parts if isinstance(part, Content))
        return Delta(
            content=content or UNSET,
            reasoning=reasoning or UNSET,
            reasoning_content=reasoning or UNSET,
            tool_calls=self._call_deltas(parts) or UNSET,
        )

    def message(self, text: str, echoed: str) -> Message:
        """The whole message. echoed: what its content begins with, whatever the answer is."""
        reasoning, content, calls = "", echoed, list[tuple[str, str, list[str]]]()
        for part in self._parts(text, is_last=True):
            match part:
                case Reasoning(piece):
                    reasoning += piece
                case Content(piece):
                    content += piece
                case CallBegin(index, name):
                    calls.append((self._id_of(index, name), name, []))
                case CallArguments(_, piece):
                    calls[-1][2].append(piece)
        tool_calls = [
            ToolCall(call_id, ToolFunction(name, "".join(pieces)))
            for call_id, name, pieces in calls
        ]
        return Message(
            role=ROLE,
            content=content if content or not (reasoning or tool_calls) else None,
            tool_calls=tool_calls or UNSET,
            reasoning=reasoning or UNSET,
            reasoning_content=reasoning or UNSET,
        )

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended: for calls that the model chose, as OpenAI says it."""
        if reason == "stop" and self._has_calls and self._form.called is None:
            return "tool_calls"
        return reason

    def _parts(self, text: str, is_last: bool) -> list[Part]:
        parts = self._parser.feed(text)
        if is_last:
            parts += self._parser.finish()
        self._has_calls = self._has_calls or any(isinstance(part, CallBegin) for part in parts)
        return parts

    def _call_deltas(self, parts: Iterable[Part]) -> list[ToolCallDelta]:
        """One delta a call, since some clients read no second one; its id and name come first."""
        names, arguments = dict[int, str](), dict[int, str]()
        for part in parts:
            match part:
                case CallBegin(index, name):
                    names[index], arguments[index] = name, ""
                case CallArguments(index, text):
                    arguments[index] = arguments.get(index, "") + text
        return [self._call_delta(index, names.get(index), arguments[index]) for index in arguments]

    def _call_delta(self, index: int, name: str | None, arguments: str) -> ToolCallDelta:
        """name: None for a call that has begun before."""
        if name is None:
            return ToolCallDelta(index, FunctionDelta(arguments=arguments))
        function = FunctionDelta(name=name, arguments=arguments)
        return ToolCallDelta(index, function, id=self._id_of(index, name), type="function")

    def _id_of(self, index: int, name: str) -> str:
        return self._ids.id_of(self._choice, index, name)
