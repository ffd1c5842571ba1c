"""Calls of DeepSeek's V3 and R1: each between marks, its arguments in a fenced block.

Since V3.1 the arguments follow the name without a fence.
"""

from __future__ import annotations

from lora_serve.chat.tool_parsers.reader import CallReader, Steps

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekCalls(CallReader):
    def read(self) -> Steps:
        yield from self.spaces()
        yield from self.expect(CALL_BEGIN)
        while True:
            yield from self._call()
            yield from self.spaces()
            if (yield from self.one_of(CALL_BEGIN, CALLS_END)) == CALLS_END:
                self.end_call()
                return

    def _call(self) -> Steps:
        self.begin_reading()
        name = yield from self.run(self.name_run)  # before V3.1 "function", whatever the name
        yield from self.expect(SEPARATOR)
        if (yield from self.spaces()) != "{":
            name = yield from self.run(self.name_run)
            yield from self.spaces()
            yield from self.expect("```json")
            yield from self.arguments_of(name)
            yield from self.spaces()
            yield from self.expect("```")
        else:
            yield from self.arguments_of(name)
        yield from self.expect(CALL_END)
        self.end_call()
