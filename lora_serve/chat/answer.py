"""An answer's text to its parts: first the reasoning, then, in what is content, the tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lora_serve.chat.parts import CallArguments, CallBegin, Content, Part, PartParser
from lora_serve.chat.reasoning_parsers.parser import ReasoningFormat, ReasoningParser
from lora_serve.chat.tool_parsers.forced import REQUIRED, NamedCall
from lora_serve.chat.tool_parsers.parser import ToolFormat, ToolParser
from lora_serve.chat.tool_parsers.reader import Schemas


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


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What is looked for in all answers to one request.

    schemas: of the tools that may be called; empty if none may.
    must_call: the answer is a list of calls. called: it is the arguments of this tool.
    grammar_waits: whether a grammar holds what follows the reasoning alone.
    """

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    must_call: bool = False
    called: str | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool = True
    grammar_waits: bool = False

    def parser(self, prompt_ending: str) -> AnswerParser:
        """A parser for one answer. prompt_ending: says whether it begins within reasoning."""
        return AnswerParser(
            self.reasoning_parser(prompt_ending),
            self._call_parser(),
            include_reasoning=self.include_reasoning,
            parallel_tool_calls=self.parallel_tool_calls,
        )

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens that must stay in an answer's text."""
        reasoning = self.reasoning.special_tokens if self.reasoning is not None else ()
        if self.tools is None or not self.schemas or self.is_forced:
            return reasoning
        return (*reasoning, *self.tools.special_tokens)

    @property
    def is_forced(self) -> bool:
        return self.must_call or self.called is not None

    def reasoning_parser(self, prompt_ending: str) -> ReasoningParser | None:
        if self.reasoning is None or (self.is_forced and not self.grammar_waits):
            return None  # a forced call begins with the first token
        is_open = self.reasoning.is_open_in(prompt_ending)
        return ReasoningParser(self.reasoning, is_open=is_open)

    def tool_parser(self) -> ToolParser | None:
        """A parser of the calls that the model may choose to make."""
        if self.is_forced or self.tools is None or not self.schemas:
            return None
        return ToolParser(self.tools, self.schemas)

    def _call_parser(self) -> PartParser | None:
        if self.must_call:
            return ToolParser(REQUIRED, self.schemas)
        return self.tool_parser() if self.called is None else NamedCall(self.called)
