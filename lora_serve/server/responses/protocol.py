"""The body of a request to /v1/responses. Null always means "not given"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator

from lora_serve.chat.tools import ToolChoice
from lora_serve.server.openai.constraints import named_schema, parse_response_format
from lora_serve.server.openai.fields import (
    Body,
    CacheSalt,
    Ignored,
    Integer,
    JsonObject,
    TemplateKwargs,
    Unsupported,
    neutral_is,
)
from lora_serve.server.openai.kv_transfer import KVTransferField
from lora_serve.server.openai.protocol import ModelName, ReasoningEffort, RequestId
from lora_serve.server.openai.sampling_fields import SamplingFields
from lora_serve.server.openai.tool_fields import (
    MAX_TOOLS,
    FunctionBody,
    ToolBody,
    ToolName,
    allowed_tools,
    check_names,
    check_tool,
)
from lora_serve.server.responses.items import InputItems
from lora_serve.structured_outputs import StructuredOutput

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
MAX_ID_CHARS = 1024

Label = Annotated[str, Field(max_length=MAX_ID_CHARS)]
MetadataText = Annotated[str, Field(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], MetadataText], Field(max_length=MAX_METADATA)
]


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    output_schema: Ignored = None
    defer_loading: Unsupported = None
    allowed_callers: Unsupported = None

    @cached_property
    def of_chat(self) -> ToolBody:
        """The same tool as a chat has it."""
        function = FunctionBody.model_construct(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )
        return ToolBody.model_construct(type="function", function=function)


def check_function(tool: FunctionTool) -> FunctionTool:
    check_tool(tool.of_chat)
    return tool


def check_functions(tools: list[FunctionTool]) -> list[FunctionTool]:
    check_names([tool.of_chat for tool in tools])
    return tools


FunctionTools = Annotated[
    list[Annotated[FunctionTool, AfterValidator(check_function)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    AfterValidator(check_functions),
]


class ChosenTool(Body):
    type: Literal["function"]
    name: ToolName


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


def parse_tool_choice(value: object) -> ToolChoice | None:
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "name": str(name)}:
            return ToolChoice("named", name)
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            return allowed_tools(mode, [_tool_name(tool) for tool in tools])
    raise ValueError(
        'must be "none", "auto", "required", {"type": "function", "name": "the name of a tool"} '
        'or {"type": "allowed_tools", "mode": "auto", "tools": […]}; this server has no tools '
        "of its own"
    )


def _tool_name(tool: object) -> str | None:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
    return None


@dataclass(frozen=True, slots=True)
class TextFormat:
    """What the text of an answer must match, and how the body said it."""

    constraint: StructuredOutput | None
    shown: JsonObject


TEXT_FORMATS = ("text", "json_object", "json_schema")
PLAIN = TextFormat(None, {"type": "text"})


def parse_text_format(value: object) -> TextFormat:
    """A chat's response_format, but for a schema that stands beside its type."""
    if value is None:
        return PLAIN
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in TEXT_FORMATS:
        raise ValueError(
            f"must be an object whose `type` is one of {', '.join(TEXT_FORMATS)}; what else an "
            "answer must match is said by structured_outputs"
        )
    assert isinstance(value, dict), "what has a type is an object"
    if kind != "json_schema":
        return TextFormat(parse_response_format(value), value)
    schema = {name: given for name, given in value.items() if name != "type"}
    return TextFormat(named_schema(schema, "an object `schema`"), value)


class _SchemaFormat(Body):
    type: Literal["json_schema"]
    name: str
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class _PlainFormat(Body):
    type: Literal["text", "json_object"]


class TextConfig(Body):
    format: Annotated[
        TextFormat, PlainValidator(parse_text_format, _SchemaFormat | _PlainFormat | None)
    ] = PLAIN
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Body):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Ignored = None
    context: Annotated[None, PlainValidator(neutral_is("auto"), Literal["auto"] | None)] = None
    mode: Annotated[None, PlainValidator(neutral_is("standard"), Literal["standard"] | None)] = None


class ResponseStreamOptions(Body):
    include_obfuscation: Ignored = None


class ResponseBody(SamplingFields):
    """POST /v1/responses."""

    input: InputItems
    model: ModelName | None = None
    request_id: RequestId | None = None
    instructions: str | None = None
    previous_response_id: Label | None = None
    tools: FunctionTools | None = None
    tool_choice: Annotated[
        ToolChoice | None,
        PlainValidator(
            parse_tool_choice,
            Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice | None,
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Integer | None = None
    max_output_tokens: Integer | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None

    # Told again with the answer, and without effect.
    metadata: Metadata | None = None
    max_tool_calls: Integer | None = None  # of tools that the server would call itself
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: Ignored = None
    prompt_cache_options: Ignored = None
    session_id: Ignored = None

    # vLLM's, as in chats.
    kv_transfer_params: KVTransferField = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    cache_salt: CacheSalt = ""
    priority: Integer | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # What would change an answer, and is not offered.
    conversation: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    background_options: Unsupported = None
    moderation: Unsupported = None
    image: Unsupported = None
    vllm_xargs: Unsupported = None
    enable_response_messages: Unsupported = None
    previous_input_messages: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    media_io_kwargs: Unsupported = None

    @property
    def text_format(self) -> TextFormat:
        return PLAIN if self.text is None else self.text.format

    @property
    def shows_logprobs(self) -> bool:
        """Whether they are asked for; naming their tokens asks for them, as in chats."""
        return LOGPROBS in (self.include or ()) or bool(self.logprob_token_ids)
