"""Tools, the choice among them, and calls of earlier answers, as bodies of chats hold them."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo

from lora_serve.chat.history import PastArguments, PastCall
from lora_serve.chat.tools import Tool, ToolChoice
from lora_serve.server.http.json_shape import TALLY, JsonTally
from lora_serve.server.openai.fields import Body, Ignored, JsonObject, Name, Unsupported, json_text

MAX_TOOLS = 128
MAX_TOOL_BYTES = 64 * 2**10
MAX_TOOL_NAME_CHARS = 128  # OpenAI allows 64
MAX_ARGUMENTS_CHARS = 2**20  # of a past call
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
    if tool.num_bytes > MAX_TOOL_BYTES:
        raise ValueError(
            f"has {tool.num_bytes} bytes in {function.name}, at most {MAX_TOOL_BYTES} are allowed; "
            "shorten its description and its schema"
        )
    return tool


class ToolBody(Body):
    type: Literal["function"] = "function"
    function: FunctionBody
    cache_control: Ignored = None
    defer_loading: Unsupported = None

    @cached_property
    def num_bytes(self) -> int:
        """The size of what describes it, as JSON."""
        described = [self.function.description, self.function.parameters]
        return len(json.dumps(described, ensure_ascii=False).encode("utf-8", "surrogatepass"))

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


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def parse_tool_choice(value: object) -> ToolChoice | None:
    if value is None:
        return None
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}:
            return allowed_tools(mode, [_chosen_name(tool) for tool in tools])
    raise ValueError(
        'must be "none", "auto", "required", '
        '{"type": "function", "function": {"name": "the name of a tool"}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}'
    )


def allowed_tools(mode: object, names: list[str | None]) -> ToolChoice:
    """The choice of a body that lets a part of its tools be called.

    Raises:
        ValueError: in words that follow the field's name.
    """
    found = tuple(name for name in names if name is not None)
    if mode not in ("auto", "required"):
        raise ValueError('must have "auto" or "required" as the mode of allowed_tools')
    if not 1 <= len(found) == len(names) <= MAX_TOOLS:
        raise ValueError(f"must name from 1 to {MAX_TOOLS} functions in allowed_tools")
    return ToolChoice("auto" if mode == "auto" else "required", allowed=found)


def _chosen_name(tool: object) -> str | None:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


def parse_arguments(value: object, info: ValidationInfo | None) -> PastArguments:
    """A JSON object, as the text that an answer held; some clients send the object itself.

    info: of the body's validation, whose texts of JSON are bounded together.
    """
    if isinstance(value, dict):
        return PastArguments(value, json_text(value, MAX_ARGUMENTS_CHARS))
    text = "{}" if value in (None, "") else value
    if isinstance(text, str):
        _check_arguments(text, _tally(info))
    try:
        arguments = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not isinstance(text, str):
        raise ValueError("must be the text of a JSON object")
    return PastArguments(arguments, text)


def _tally(info: ValidationInfo | None) -> JsonTally:
    context = (info.context or {}) if info is not None else {}
    tally = context.get(TALLY)
    return tally if isinstance(tally, JsonTally) else JsonTally()


def _check_arguments(text: str, tally: JsonTally) -> None:
    """Refuse what takes long to parse, or much memory. As a string it is one value of its body.

    tally: of the texts that the body has held so far.
    """
    if len(text) > MAX_ARGUMENTS_CHARS:
        raise ValueError(
            f"has {len(text)} characters, at most {MAX_ARGUMENTS_CHARS} are allowed; shorten it"
        )
    found = tally.add(text.encode("utf-8", "surrogatepass"))
    if found is not None:
        raise ValueError(f"holds, with all that came before it, {found}; shorten it")


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
    PlainValidator(
        parse_tool_choice,
        Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None,
    ),
]
PastCalls = Annotated[list[PastCallBody], Field(max_length=MAX_PAST_CALLS, fail_fast=True)]
