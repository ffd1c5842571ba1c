"""Tools, the choice among them, and calls of earlier answers, as bodies of chats hold them."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator

from lora_serve.chat.history import PastArguments, PastCall
from lora_serve.chat.tools import Tool, ToolChoice
from lora_serve.server.openai.fields import Body, Ignored, JsonObject, Name

MAX_TOOLS = 128
MAX_TOOL_BYTES = 64 * 2**10
MAX_TOOL_NAME_CHARS = 128  # OpenAI allows 64
MAX_PAST_CALLS = 1024  # in one message

ToolName = Annotated[
    str, Field(max_length=MAX_TOOL_NAME_CHARS, pattern=r"^[A-Za-z0-9_.:/-]+$")
]  # of such names no format of calls makes anything else


class FunctionBody(Body):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


def check_tool(tool: ToolBody) -> ToolBody:
    function = tool.function
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object":
        raise ValueError(
            f"has parameters of type {json.dumps(kind)[:40]} in {function.name}; arguments are "
            "an object"
        )
    written = json.dumps([function.description, function.parameters], ensure_ascii=False)
    num_bytes = len(written.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_TOOL_BYTES:
        raise ValueError(
            f"has {num_bytes} bytes in {function.name}, at most {MAX_TOOL_BYTES} are allowed; "
            "shorten its description and its schema"
        )
    return tool


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody

    @property
    def tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description, function.parameters, bool(function.strict))


def check_names(tools: list[ToolBody]) -> list[ToolBody]:
    seen: set[str] = set()
    for tool in tools:
        if tool.function.name in seen:
            raise ValueError(f"has two tools named {tool.function.name}; rename one")
        seen.add(tool.function.name)
    return tools


class ChosenFunction(Body):
    name: ToolName


class NamedToolChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


def parse_tool_choice(value: object) -> ToolChoice | None:
    if value is None:
        return None
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", name)
    raise ValueError(
        'must be "none", "auto", "required" or '
        '{"type": "function", "function": {"name": "the name of a tool"}}'
    )


def parse_arguments(value: object) -> PastArguments:
    """A JSON object, as the text that an answer held; some clients send the object itself."""
    if isinstance(value, dict):
        return PastArguments(value, json.dumps(value, ensure_ascii=False))
    text = "{}" if value in (None, "") else value
    try:
        arguments = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not isinstance(text, str):
        raise ValueError("must be the text of a JSON object")
    return PastArguments(arguments, text)


class PastFunction(Body):
    name: Name
    arguments: Annotated[PastArguments, PlainValidator(parse_arguments, str | JsonObject | None)]


class PastCallBody(Body):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: PastFunction
    index: Ignored = None  # of a streamed call

    @property
    def call(self) -> PastCall:
        return PastCall(self.function.name, self.function.arguments, self.id)


Tools = Annotated[
    list[Annotated[ToolBody, AfterValidator(check_tool)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    AfterValidator(check_names),
]
ToolChoiceField = Annotated[
    ToolChoice | None,
    PlainValidator(parse_tool_choice, Literal["none", "auto", "required"] | NamedToolChoice | None),
]
PastCalls = Annotated[list[PastCallBody], Field(max_length=MAX_PAST_CALLS, fail_fast=True)]
