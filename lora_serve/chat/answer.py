"""An answer's text to its parts: first the reasoning, then, in what is content, the tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from lora_serve.chat.parts import CallArguments, CallBegin, Content, Part, PartParser


class AnswerParser:
    """One answer. A parser that is None finds nothing.

    include_reasoning: whether it is told. parallel_tool_calls: whether more than one call is.
    """

    def __init__(
        self,
        reasoning: PartParser | None = None,
        tools: PartParser | None = None,
        *,
        include_reasoning: bool = True,
        parallel_tool_calls: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._include_reasoning = include_reasoning
        self._parallel_tool_calls = parallel_tool_calls

    def feed(self, text: str) -> list[Part]:
        parts = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._told(self._with_calls(parts))

    def finish(self) -> list[Part]:
        parts = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        if self._tools is not None:
            parts += self._tools.finish()
        return self._told(parts)

    def _with_calls(self, parts: Iterable[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Content) and self._tools is not None:
                found += self._tools.feed(part.text)
            else:
                found.append(part)
        return found

    def _told(self, parts: Iterable[Part]) -> list[Part]:
        return [part for part in parts if self._is_told(part)]

    def _is_told(self, part: Part) -> bool:
        match part:
            case CallBegin() | CallArguments():
                return part.index == 0 or self._parallel_tool_calls
            case Content(text):
                return bool(text)
            case _:
                return self._include_reasoning
