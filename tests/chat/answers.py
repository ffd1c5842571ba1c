"""Calls as each format writes them, and what a parser's parts come to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lora_serve.chat.parts import CallArguments, CallBegin, Content, Part, PartParser, Reasoning
from lora_serve.chat.tool_parsers.parser import ToolParser
from lora_serve.chat.tool_parsers.registry import TOOL_FORMATS

Arguments = dict[str, object]
Call = tuple[str, Arguments]

FORMATS = {form.name: form for form in TOOL_FORMATS}
SCHEMAS: dict[str, dict[str, object]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "object"},
            "hours": {"type": "array"},
            "is_exact": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
CALLS: list[Call] = [
    ("get_weather", {"city": 'Zürich "\\ 😀\n', "days": 3, "units": {"t": ["C", None, -1.5e3]}}),
    ("now", {}),
    ("get_weather", {"is_exact": True, "hours": [1, [2, {}], "]})"], "city": "</tool_call"}),
]


@dataclass
class Answer:
    """All parts, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, part: Part) -> None:
        match part:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegin(index, name):
                assert index == len(self.calls)
                self.calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(self.calls) - 1
                name, before = self.calls[index]
                self.calls[index] = (name, before + text)

    @property
    def parsed_calls(self) -> list[Call]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def answer_of(parser: PartParser, pieces: Iterable[str]) -> Answer:
    answer = Answer()
    for piece in pieces:
        for part in parser.feed(piece):
            answer.add(part)
    for part in parser.finish():
        answer.add(part)
    return answer


def tool_parser(name: str) -> ToolParser:
    return ToolParser(FORMATS[name], SCHEMAS)


def _json_call(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _python_call(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def _xml_call(call: Call) -> str:
    def text(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    parameters = "".join(
        f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in call[1].items()
    )
    return f"<tool_call>\n<function={call[0]}>\n{parameters}</function>\n</tool_call>"


def _fenced_call(call: Call) -> str:
    arguments = json.dumps(call[1], ensure_ascii=False)
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
    )


def _plain_call(call: Call) -> str:
    return f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{json.dumps(call[1])}<｜tool▁call▁end｜>"


def _listed(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(map(_json_call, calls)) + "]"


def _between_marks(calls: Sequence[Call], write: Callable[[Call], str]) -> str:
    return f"<｜tool▁calls▁begin｜>{chr(10).join(map(write, calls))}<｜tool▁calls▁end｜>"


# How some calls are written: by the name of the format, each way that it knows.
WRITERS: dict[str, list[Callable[[Sequence[Call]], str]]] = {
    "hermes": [
        lambda calls: "\n".join(f"<tool_call>\n{_json_call(c)}\n</tool_call>" for c in calls),
        lambda calls: "".join(f"<tool_call>{_json_call(c)}" for c in calls),  # without an end
    ],
    "mistral": [
        lambda calls: "[TOOL_CALLS]" + _listed(calls),
        lambda calls: "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls]),
        lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls),
        lambda calls: "".join(f"[TOOL_CALLS]{n}{json.dumps(a)}" for n, a in calls),
        lambda calls: "".join(
            f"[TOOL_CALLS]{n}[CALL_ID]a1B2c3D4e[ARGS]{json.dumps(a)}" for n, a in calls
        ),
    ],
    "internlm": [
        lambda calls: "\n".join(
            f"<|action_start|><|plugin|>\n{_json_call(call, key)}<|action_end|>"
            for call, key in zip(calls, ("arguments", "parameters", "arguments"), strict=False)
        ),
        lambda calls: "".join(f"<|action_start|><|plugin|>{_json_call(c)}" for c in calls),
    ],
    "granite": [lambda calls: "<|tool_call|>" + _listed(calls)],
    "llama3_json": [
        lambda calls: "; ".join(_json_call(call, "parameters") for call in calls),
        lambda calls: "<|python_tag|>" + ";".join(_json_call(call, "parameters") for call in calls),
        lambda calls: "; ".join(
            json.dumps({"type": "function", "parameters": arguments, "name": name})
            for name, arguments in calls
        ),
    ],
    "pythonic": [lambda calls: f"[{', '.join(map(_python_call, calls))}]"],
    "llama4_pythonic": [
        lambda calls: f"[{', '.join(map(_python_call, calls))}]",
        lambda calls: f"<|python_start|>[{', '.join(map(_python_call, calls))}]<|python_end|>",
    ],
    "qwen3_coder": [lambda calls: "\n".join(map(_xml_call, calls))],
    "deepseek_v3": [
        lambda calls: _between_marks(calls, _fenced_call),
        lambda calls: _between_marks(calls, _plain_call),
    ],
}
WAYS = [(name, write) for name, ways in WRITERS.items() for write in ways]
