"""Conversations with tools, in templates of our own that hold what families' templates hold."""

from __future__ import annotations

import json

import pytest

from lora_serve.chat.history import PastArguments, PastCall, PastMessage
from lora_serve.chat.tools import Tool
from lora_serve.text.tokenizer import Tokenizer

ARGUMENTS = '{"city":  "Zürich", "days": 3}'  # with a space that no encoder writes
HISTORY = [
    PastMessage("user", "hi"),
    PastMessage(
        "assistant",
        reasoning="hm",
        tool_calls=[
            PastCall("get_weather", PastArguments(json.loads(ARGUMENTS), ARGUMENTS), "a1b2c3d4e")
        ],
    ),
    PastMessage("tool", "20 °C", tool_call_id="a1b2c3d4e"),
]
TOOLS = [Tool("get_weather", "Of a city.", {"type": "object", "properties": {}})]
JSON = '{"city": "Zürich", "days": 3}'

# Each writes the assistant's message in the way of a family: what it reads, and how.
TEMPLATES = {
    "qwen": (
        "{%- if message.reasoning_content is string %}<think>\n"
        "{{ message.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}{{ message.content }}"
        "{%- for call in message.tool_calls %}{% set call = call.function %}<tool_call>\n"
        '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
        "{%- endfor %}",
        "<think>\nhm\n</think>\n\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
    ),
    "qwen that asks for a string": (
        "{%- for call in message.tool_calls %}{%- if call.function.arguments is string %}text"
        "{%- else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor %}",
        JSON,
    ),
    "llama": (
        "{%- set call = message.tool_calls[0].function %}"
        '{{- \'{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}}',
        f'{{"name": "get_weather", "parameters": {JSON}}}',
    ),
    "llama with its own tools": (
        "{%- for name, value in message.tool_calls[0].function.arguments.items() %}"
        "{{ name + '=' + value | string }} {% endfor %}",
        "city=Zürich days=3 ",
    ),
    "mistral": (
        "{%- if message.tool_calls[0].id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
        "[TOOL_CALLS][{{ message.tool_calls[0].function | tojson }}]",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {JSON}}}]',
    ),
    "granite": (
        "{{- '<|start_of_role|>assistant<|end_of_role|>' + message['content'] }}"
        "{{- '<|tool_call|>[' + message.tool_calls[0].function.name }}",
        "<|start_of_role|>assistant<|end_of_role|><|tool_call|>[get_weather",
    ),
    "deepseek": (
        "{%- for call in message['tool_calls'] %}{{ message['content'] +"
        "call['function']['name'] + '\n```json\n' + call['function']['arguments'] + '\n```' }}"
        "{%- endfor %}",
        f"get_weather\n```json\n{ARGUMENTS}\n```",
    ),
}


@pytest.mark.parametrize(("template", "expected"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_call_is_written_as_its_familys_template_reads_it(
    byte_level: Tokenizer, template: str, expected: str
) -> None:
    template = (
        "{%- for message in messages %}{%- if message.role == 'assistant' %}"
        f"{template}{{%- elif message.role == 'tool' %}}|{{{{ message.tool_call_id }}}}|"
        "{{- message.content }}{% endif %}{% endfor %}"
    )
    text = byte_level.render_chat(
        [message.plain(template) for message in HISTORY],
        chat_template=template,
        tools=[tool.plain for tool in TOOLS],
    )
    assert text == f"{expected}|a1b2c3d4e|20 °C"


def test_tools_are_written_with_what_they_have(byte_level: Tokenizer) -> None:
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    text = byte_level.render_chat(
        [{"role": "user", "content": ""}],
        chat_template=template,
        tools=[tool.plain for tool in (*TOOLS, Tool("now"))],
    )
    assert text == (
        '{"type": "function", "function": {"name": "get_weather", "description": "Of a city.", '
        '"parameters": {"type": "object", "properties": {}}}}'
        '{"type": "function", "function": {"name": "now"}}'
    )


def test_a_message_holds_only_what_it_has() -> None:
    assert PastMessage("user", "hi").plain("") == {"role": "user", "content": "hi"}
    assert PastMessage("assistant").plain("") == {"role": "assistant", "content": ""}


def test_all_texts_of_a_message_count() -> None:
    assert [message.num_chars for message in HISTORY] == [
        len("userhi"),
        len("assistanthm" + "get_weather" + "a1b2c3d4e" + ARGUMENTS),
        len("tool20 °Ca1b2c3d4e"),
    ]
