"""Calls of Qwen3 Coder and of later Qwens: <function=NAME> around <parameter=KEY> elements.

A value is text; the tool's schema says whether it stands for a string or for other JSON. Strings
are told piece by piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from types import MappingProxyType

from lora_serve.chat.markers import MarkerSearch, SearchStep
from lora_serve.chat.tool_parsers.reader import CallReader, Steps

END_OF_VALUE = "</parameter>"
_KEY_RUN = re.compile(r"[^<>\n]*")
_PYTHON_WORDS = MappingProxyType({"True": "true", "False": "false", "None": "null"})


class Qwen3CoderCalls(CallReader):
    def read(self) -> Steps:
        yield from self.spaces()
        yield from self.expect("<function=")
        name = yield from self.run(self.name_run)
        yield from self.expect(">")
        self.tell_call(name)
        self.tell_arguments("{")
        separator = ""
        yield from self.spaces()
        while (yield from self.one_of("<parameter=", "</function>")) == "<parameter=":
            key = yield from self.run(_KEY_RUN)
            yield from self.expect(">")
            self.tell_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            if self._is_string(name, key):
                yield from self._string()
            else:
                yield from self._json()
            separator = ", "
            yield from self.spaces()
        self.tell_arguments("}")
        self.end_call()
        yield from self.accept("</tool_call>")

    def _is_string(self, name: str, key: str) -> bool:
        properties = self._schemas[name].get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        kind = schema.get("type") if isinstance(schema, dict) else None
        return kind in (None, "string")

    def _string(self) -> Steps:
        self.tell_arguments('"')
        search = MarkerSearch([END_OF_VALUE], "\n")
        is_first = True
        while True:
            step = yield from self._step(search)
            text = step.shown
            if step.marker is not None:
                text += step.blanks.removesuffix("\n")
            if text and is_first:
                text, is_first = text.removeprefix("\n"), False
            self.tell_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if step.marker is not None:
                self.tell_arguments('"')
                return

    def _json(self) -> Steps:
        search = MarkerSearch([END_OF_VALUE], "")
        pieces = []
        while True:
            step = yield from self._step(search)
            pieces.append(step.shown)
            if step.marker is not None:
                self.tell_arguments(_as_json("".join(pieces).strip()))
                return

    def _step(self, search: MarkerSearch) -> Generator[None, None, SearchStep]:
        """Read what there is of a value."""
        yield from self.char()
        step = search.push(self._text[self._position :])
        self._untold.append(self._text[self._position : len(self._text) - len(step.rest)])
        self._position = len(self._text) - len(step.rest)
        return step


def _as_json(text: str) -> str:
    """A value as it was written, if it is JSON, else as a string."""
    text = _PYTHON_WORDS.get(text, text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(constant: str) -> object:
    raise ValueError(constant)
