"""What a body's choice among its tools asks of an answer: how it is read, and what it must be."""

from __future__ import annotations

from collections.abc import Collection

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.tools import ToolChoice, calls_schema
from lora_serve.errors import InvalidRequestError
from lora_serve.server.openai.chat_formats import TemplateFormats
from lora_serve.server.openai.parameters import constraint_field
from lora_serve.server.openai.protocol import ChatBody
from lora_serve.structured_outputs import StructuredOutput

_REMEDY = "start the server with --tool-call-parser, or with a --chat-template that writes tools"


def answer_format(
    body: ChatBody, formats: TemplateFormats, *, needs_calls: bool = False
) -> AnswerFormat:
    """What to look for in the answers to a body.

    needs_calls: the server was asked to read calls (--enable-auto-tool-choice). Without it, the
        answers of a model whose format is not known are text, calls and all.

    Raises:
        InvalidRequestError: its tool_choice names no tool of its own, or calls are to be read and
            nothing tells how this model writes them.
    """
    tools = {tool.function.name: tool.tool for tool in body.tools or ()}
    choice = body.tool_choice or ToolChoice("auto")
    _check_choice(choice, tools)
    if needs_calls and choice.mode == "auto" and tools and formats.tools is None:
        raise InvalidRequestError(
            f"the server does not know how this model writes tool calls; {_REMEDY}", "tools"
        )
    return AnswerFormat(
        reasoning=formats.reasoning,
        tools=formats.tools,
        schemas={name: tool.schema for name, tool in tools.items() if choice.permits(name)},
        must_call=choice.mode == "required",
        called=choice.name,
        include_reasoning=body.include_reasoning is not False,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def _check_choice(choice: ToolChoice, tools: Collection[str]) -> None:
    if choice.mode in ("required", "named") and not tools:
        raise InvalidRequestError("tool_choice needs tools, of which there are none", "tool_choice")
    for name in choice.names:
        if name not in tools:
            raise InvalidRequestError(
                f"tool_choice names {name}, which is none of the tools: "
                f"{', '.join(list(tools)[:10])}",
                "tool_choice",
            )


def forced_calls(body: ChatBody, form: AnswerFormat) -> StructuredOutput | None:
    """The constraint of an answer that must call: a list of calls, or one tool's arguments.

    A `response_format` is of a text, which such an answer has none of.

    Raises:
        InvalidRequestError: the schemas are too large, or the body constrains the answer itself.
    """
    if not form.is_forced:
        return None
    field = constraint_field(body)
    if field not in (None, "response_format"):
        raise InvalidRequestError(
            f"a tool_choice that forces a call and {field} exclude each other; give one of them",
            "tool_choice",
        )
    callable_names = set(form.schemas) if form.called is None else {form.called}
    tools = [tool.tool for tool in body.tools or () if tool.function.name in callable_names]
    if form.called is None:
        schema = calls_schema(tools, is_parallel=form.parallel_tool_calls)
    else:
        schema = tools[0].schema
    output = StructuredOutput.of(json=schema, param="tools")
    output = StructuredOutput(output.kind, output.text, any(tool.is_strict for tool in tools))
    output.verify("tools")
    return output
