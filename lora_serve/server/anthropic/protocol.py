"""Bodies of requests, as Anthropic's clients write them. Null always means "not given".

Types only; `conversation.py` says what a body is as a chat's. A validator raises ValueError with
words that follow the field's name.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from lora_serve.chat.history import PastArguments
from lora_serve.errors import InvalidRequestError
from lora_serve.sampling_params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from lora_serve.server.openai.fields import (
    MAX_CONTENT_PARTS,
    Body,
    CacheSalt,
    Ignored,
    Integer,
    JsonObject,
    Name,
    TemplateKwargs,
    Unsupported,
)
from lora_serve.server.openai.protocol import MAX_MESSAGES, ModelName
from lora_serve.server.openai.tool_fields import (
    MAX_TOOLS,
    FunctionBody,
    ToolBody,
    ToolName,
    check_names,
    check_tool,
    parse_arguments,
)
from lora_serve.structured_outputs import StructuredOutput

MIN_THINKING_TOKENS = 1024  # as Anthropic has it

# What a block must have, and may have, by its type.
BLOCK_FIELDS = {
    "text": {"text"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id"},
    "thinking": {"thinking"},
    "redacted_thinking": {"data"},
}
OPTIONAL_FIELDS = {"tool_result": {"content", "is_error"}, "thinking": {"signature"}}
OWN_FIELDS = set[str]().union(*BLOCK_FIELDS.values(), *OPTIONAL_FIELDS.values())
ROLE_BLOCKS = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
    "system": {"text"},
}


def refuse_foreign_block(value: object) -> object:
    """Refuse what is no text by its own name, whatever fields it has."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in BLOCK_FIELDS:
        raise ValueError(
            f"is a block of type {kind[:40]!r}, and this server reads text alone; send the types "
            f"{', '.join(BLOCK_FIELDS)}"
        )
    return value


def refuse_server_tool(value: object) -> object:
    """Refuse a tool that Anthropic's servers would run, whatever fields it has."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(
            f"is a tool of type {kind[:40]!r}, which Anthropic's servers run and this one does "
            "not; leave it out, or send a tool of your own with a name and an input_schema"
        )
    return value


def as_blocks(value: object) -> object:
    """A text is one block of it."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of blocks")
    return value


class TextBlockParam(Body):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


def refuse_all_but_text(value: object) -> object:
    """Refuse an image, or what else is no text, by its own name."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"is a block of type {kind[:40]!r}; only text can stand here")
    return value


Texts = Annotated[
    list[Annotated[TextBlockParam, BeforeValidator(refuse_all_but_text)]],
    Field(max_length=MAX_CONTENT_PARTS),
    BeforeValidator(as_blocks, json_schema_input_type=str | list[TextBlockParam]),
]


def parse_past_input(value: object) -> PastArguments | None:
    if value is not None and not isinstance(value, dict):
        raise ValueError("must be an object")
    return None if value is None else parse_arguments(value, None)


PastInput = Annotated[PastArguments | None, PlainValidator(parse_past_input, JsonObject | None)]


class BlockParam(Body):
    """Any block of a message."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: PastInput = None
    tool_use_id: Name | None = None
    content: Texts | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: Ignored = None
    data: Ignored = None
    cache_control: Ignored = None
    citations: Ignored = None
    caller: Ignored = None
    toolset_name: Ignored = None


def check_block(block: BlockParam) -> BlockParam:
    needed = BLOCK_FIELDS[block.type]
    given = OWN_FIELDS & block.model_fields_set
    if missing := sorted(name for name in needed - {"data"} if getattr(block, name) is None):
        raise ValueError(f"is of type {block.type} and has no {missing[0]}")
    if foreign := sorted(given - needed - OPTIONAL_FIELDS.get(block.type, set())):
        raise ValueError(f"is of type {block.type}, which has no {foreign[0]}; leave it out")
    return block


Blocks = Annotated[
    list[Annotated[BlockParam, BeforeValidator(refuse_foreign_block), AfterValidator(check_block)]],
    Field(max_length=MAX_CONTENT_PARTS),
    BeforeValidator(as_blocks, json_schema_input_type=str | list[BlockParam]),
]


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks


def check_message(message: MessageParam) -> MessageParam:
    allowed = ROLE_BLOCKS[message.role]
    for block in message.content:
        if block.type not in allowed:
            raise ValueError(
                f"has a block of type {block.type}, and the role {message.role} has "
                f"{', '.join(sorted(allowed))} alone"
            )
    return message


def check_last_message(messages: list[MessageParam]) -> list[MessageParam]:
    """A last message of the assistant is continued, so there must be text at its end."""
    last = messages[-1]
    if last.role == "assistant" and not (
        last.content and last.content[-1].type == "text" and (last.content[-1].text or "").strip()
    ):
        raise ValueError(
            "ends with a message of the assistant that does not end with text, so it cannot be "
            "continued; answer its tool_use blocks with tool_result blocks, or leave it out"
        )
    return messages


class ToolParam(Body):
    """A tool of the client's. Tools that Anthropic's servers run have another type."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: Ignored = None
    allowed_callers: Ignored = None
    input_examples: Ignored = None

    @cached_property
    def body(self) -> ToolBody:
        function = FunctionBody(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return ToolBody(type="function", function=function)


def check_tool_param(tool: ToolParam) -> ToolParam:
    check_tool(tool.body)
    return tool


def check_tool_names(tools: list[ToolParam]) -> list[ToolParam]:
    check_names([tool.body for tool in tools])
    return tools


class ToolChoiceParam(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


def check_choice(choice: ToolChoiceParam) -> ToolChoiceParam:
    if (choice.type == "tool") != (choice.name is not None):
        raise ValueError(
            f"is of type {choice.type} and has {'no' if choice.name is None else 'a'} name; a name "
            "belongs to the type tool"
        )
    return choice


class ThinkingParam(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] | None = None


def check_thinking(thinking: ThinkingParam) -> ThinkingParam:
    budget = thinking.budget_tokens
    if thinking.type == "enabled" and budget is None:
        raise ValueError("is enabled and has no budget_tokens; give them, or let it be adaptive")
    if thinking.type != "enabled" and budget is not None:
        raise ValueError(f"is {thinking.type} and has budget_tokens; leave them out")
    if budget is not None and budget < MIN_THINKING_TOKENS:
        raise ValueError(f"has {budget} budget_tokens, at least {MIN_THINKING_TOKENS} are needed")
    return thinking


def parse_output_format(value: object) -> StructuredOutput | None:
    if value is None:
        return None
    match value:
        case {"type": "json_schema", "schema": dict(schema), **others} if not others:
            pass
        case _:
            raise ValueError('must be {"type": "json_schema", "schema": {…}}')
    try:
        output = StructuredOutput.of(json=schema, param="schema")
        output.verify("schema")
    except InvalidRequestError as error:
        raise ValueError(f"cannot be kept to: {error}") from None
    return output


OutputFormat = Annotated[
    StructuredOutput | None,
    PlainValidator(parse_output_format, dict[Literal["type", "schema"], object] | None),
]


class OutputConfigParam(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat = None


class ConversationParams(Body):
    """What makes a prompt."""

    model: ModelName
    messages: Annotated[
        list[Annotated[MessageParam, AfterValidator(check_message)]],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        AfterValidator(check_last_message),
    ]
    system: Texts | None = None
    tools: (
        Annotated[
            list[
                Annotated[
                    ToolParam,
                    BeforeValidator(refuse_server_tool),
                    AfterValidator(check_tool_param),
                ]
            ],
            Field(max_length=MAX_TOOLS, fail_fast=True),
            AfterValidator(check_tool_names),
        ]
        | None
    ) = None
    tool_choice: Annotated[ToolChoiceParam, AfterValidator(check_choice)] | None = None
    thinking: Annotated[ThinkingParam, AfterValidator(check_thinking)] | None = None
    output_config: OutputConfigParam | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    # What changes no answer of this server.
    cache_control: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None

    # What would change it, and is not offered.
    container: Unsupported = None
    mcp_servers: Unsupported = None


class CountTokensBody(ConversationParams):
    """POST /v1/messages/count_tokens."""


class MessagesBody(ConversationParams):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)]
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]],
            Field(max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stream: bool | None = None

    # Of this server's own.
    cache_salt: CacheSalt = ""
    priority: Integer | None = None
    seed: Integer | None = None
