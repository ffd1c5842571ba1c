"""Calls of Mistral's models, behind [TOOL_CALLS].

Either a JSON list of calls, or, since the eleventh version of their tokenizers, one call as
name[ARGS]{…} or name{…}, with a marker of its own for each.
"""

from __future__ import annotations

from lora_serve.chat.tool_parsers.json_calls import CallList
from lora_serve.chat.tool_parsers.reader import Steps

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"


class MistralCalls(CallList):
    def read(self) -> Steps:
        if (yield from self.spaces()) in "[{":
            yield from super().read()
            return
        name = yield from self.run(self.name_run)
        if (yield from self.char()) == "[" and (yield from self.one_of(ARGS, CALL_ID)) == CALL_ID:
            yield from self.run(self.name_run)
            yield from self.expect(ARGS)
        yield from self.arguments_of(name)
        self.end_call()
