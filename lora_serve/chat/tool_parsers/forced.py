"""Calls that a grammar forces: the whole answer is JSON, in no family's own format."""

from __future__ import annotations

from lora_serve.chat.parts import Part, PartCollector
from lora_serve.chat.tool_parsers.json_calls import CallList
from lora_serve.chat.tool_parsers.parser import ToolFormat

# tool_choice "required": a list of calls.
REQUIRED = ToolFormat("required", CallList, opening="[")


class NamedCall:
    """The answer to a tool_choice that names a tool: the arguments, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found = PartCollector()

    def feed(self, text: str) -> list[Part]:
        if text and not self._found.num_calls:
            self._found.begin_call(self._name)
        self._found.arguments(text)
        return self._found.take()

    def finish(self) -> list[Part]:
        return []
