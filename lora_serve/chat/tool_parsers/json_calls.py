"""Calls written as JSON objects: {"name": …, "arguments" or "parameters": {…}}."""

from __future__ import annotations

from typing import ClassVar

from lora_serve.chat.tool_parsers.reader import CallReader, Steps


class TaggedCall(CallReader):
    """One call, then </tool_call>. A model may forget the end."""

    end: ClassVar[str] = "</tool_call>"

    def read(self) -> Steps:
        yield from self.spaces()
        yield from self.json_call()
        yield from self.accept(self.end)


class PluginAction(TaggedCall):
    """The same, with the end that InternLM writes."""

    end = "<|action_end|>"


class CallSequence(CallReader):
    """One call or several, with semicolons between them."""

    def read(self) -> Steps:
        yield from self.spaces()
        while True:
            yield from self.json_call()
            yield from self.spaces()
            yield from self.expect(";")
            yield from self.spaces()


class CallList(CallReader):
    """A JSON list of calls, or one call without a list."""

    def read(self) -> Steps:
        if (yield from self.spaces()) != "[":
            yield from self.json_call()
            return
        yield from self.call_list()

    def call_list(self) -> Steps:
        yield from self.expect("[")
        while True:
            yield from self.spaces()
            yield from self.json_call()
            if (yield from self.spaces()) == "]":
                yield from self.expect("]")
                self.end_call()
                return
            yield from self.expect(",")
