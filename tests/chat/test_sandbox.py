"""Our Jinja writes what transformers' writes, of templates that use what models' own use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from transformers.utils.chat_template_utils import render_jinja_template

from lora_serve.chat.model_template import ModelTemplate
from lora_serve.chat.template import render_chat
from lora_serve.errors import InvalidRequestError

CALL = {"type": "function", "function": {"name": "f", "arguments": {"ä<b>": [1, 2.5, None]}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "hello <x>"}], "name": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm."},
    {"role": "assistant", "content": "Sure, ", "thinking": "So."},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "é"}}}]
VARIABLES = {"style": "!", "enable_thinking": False, "sizes": [3, 1], "documents": [{"title": "T"}]}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "blocks are trimmed": "{% for m in messages %}\n  {% if m.role == 'user' %}\nU\n  {% endif %}\n"
    "    {%- if loop.last -%}  L  {%- endif %}\n{{ m['role'] }}\n{% endfor %}\n",
    "a loop that breaks": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}"
    "{% endif %}{% if loop.index0 == 3 %}{% break %}{% endif %}{{ loop.index }}"
    "{{ m.role }}{% endfor %}",
    "JSON": "{{ tools | tojson }}{{ tools | tojson(indent=4) }}"
    "{{ messages[2].tool_calls | tojson }}"
    "{{ tools | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
    "a namespace": "{% set n = namespace(at=0, self='s') %}{% for m in messages %}"
    "{% set n.at = n.at + 1 %}{% endfor %}{{ n.at }}{{ n.self }}",
    "a dict": "{% set d = dict(a=1, **{'b': 2}) %}{% for k, v in d | items %}{{ k }}{{ v }}"
    "{% endfor %}{{ dict.fromkeys(['x']) }}{{ dict([('y', 1)]) }}",
    "macros": "{% macro f(x, y='d') %}[{{ x }}{{ y }}{{ caller() if caller }}]{% endmacro %}"
    "{{ f(1) }}{% call f(2, y='e') %}in{% endcall %}",
    "filters": "{{ messages[0].content | trim | upper | replace('B', 'C') }}"
    "{{ sizes | sort | join }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | map(attribute='role') | unique | join(',') }}{{ 'a\nb' | indent(2) }}"
    "{{ messages[-1] | string }}{{ missing | default('none') }}{{ sizes | first }}",
    "methods": "{{ 'a-b'.split('-')[-1] }}{{ messages[0].content.strip().startswith('Be') }}"
    "{{ '{}|{:>4}'.format(1, 'x') }}{{ '%s-%d' % ('a', 2) }}{{ messages[1].get('x', 'y') }}",
    "tests": "{{ messages[1].content is string }}{{ messages[1].content is iterable }}"
    "{{ tools is not none }}{{ x is defined }}{{ messages[2] is mapping }}{{ x is undefined }}",
    "fields that are None": "{% for m in messages %}{{ 'content' in m }}{{ 'name' in m }}"
    "{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|"
    "{{ m.reasoning }};{% endfor %}",
    "what training marks": "{% for m in messages %}{% generation %}{{ m.role }}{{ style }}"
    "{% endgeneration %}{% endfor %}",
    "special tokens and variables": "{{ bos_token }}{{ eos_token }}{{ style }}{{ enable_thinking }}"
    "{{ add_generation_prompt }}{{ documents[0].title }}{{ pad_token is defined }}",
    "slices and operators": "{{ messages[::-1][0].role }}{{ messages[1:] | length }}{{ 7 // 2 }}"
    "{{ 7 % 4 }}{{ 2 ** 3 }}{{ 'x' * 3 }}{{ 1 ~ 2 ~ 'z' }}{{ [1] + [2] }}{{ 'a' in 'abc' }}",
    "the date": "{{ strftime_now('%Y-%m-%d') }}",
}


def ours(
    template: str,
    messages: Sequence[Mapping[str, object]] = MESSAGES,
    *,
    continues: bool = False,
) -> str:
    return render_chat(
        ModelTemplate(template, SPECIAL),
        messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        chat_template=None,
        tools=TOOLS,
        template_kwargs=VARIABLES,
    )


def theirs(
    template: str,
    messages: Sequence[Mapping[str, object]] = MESSAGES,
    *,
    continues: bool = False,
) -> str:
    """What a tokenizer of transformers renders: fields that are None are left out."""
    given = [{key: v for key, v in message.items() if v is not None} for message in messages]
    (text,), _ = render_jinja_template(
        [given],
        tools=TOOLS,
        chat_template=template,
        continue_final_message=continues,
        add_generation_prompt=not continues,
        **{**SPECIAL, **VARIABLES},
    )
    return text


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_writes_what_it_writes_in_transformers(kind: str) -> None:
    written = ours(TEMPLATES[kind])
    assert written == theirs(TEMPLATES[kind])
    assert written


CLOSED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
CONTINUED = {
    "as it is": CLOSED,
    "trimmed": CLOSED.replace("m.content", "m.content | string | trim"),
    "in parts": CLOSED.replace("m.content", "m.content[0].text or m.content"),
}


@pytest.mark.parametrize("last", ["Sure, ", "Sure", [{"type": "text", "text": "So "}]])
@pytest.mark.parametrize("kind", CONTINUED)
def test_a_message_is_continued_as_in_transformers(kind: str, last: object) -> None:
    messages = [*MESSAGES[:1], {"role": "assistant", "content": last}]
    try:
        expected = theirs(CONTINUED[kind], messages, continues=True)
    except ValueError:
        with pytest.raises(InvalidRequestError, match="the chat template refused the messages"):
            ours(CONTINUED[kind], messages, continues=True)
        return
    assert ours(CONTINUED[kind], messages, continues=True) == expected


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ messages[0].role }}", MESSAGES, "reads no content"),
        ("no content", MESSAGES, "does not stand in the conversation"),
        (CLOSED, [{"role": "assistant"}], "no content to continue"),
        (CLOSED, [{"role": "assistant", "content": [{"type": "x"}]}], "no text to continue"),
        (CLOSED, [{"role": "assistant", "content": 5}], "no text to continue"),
    ],
)
def test_what_cannot_be_continued_is_refused_with_the_reason(
    template: str, messages: list[dict[str, object]], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        ours(template, messages, continues=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.mro() }}",
        "{{ namespace.mro() }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ raise_exception.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ self._TemplateReference__context.x }}",
    ],
)
def test_a_template_reaches_nothing_of_python(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template refused the messages"):
        ours(template)


@dataclass
class Part:
    text: str


class Dumped(BaseModel):
    name: str


class Loud(str):
    def upper(self) -> str:
        return "LOUD"


def test_objects_in_messages_are_shown_as_plain_values() -> None:
    message = {
        "role": "user",
        "content": "x",
        "values": (Part("p"), Dumped(name="d"), np.int64(3), np.bool_(False), object()),
        "loud": Loud("a"),
        "sizes": {1: [2.5]},
    }
    template = "{{ messages[0]['values'] }}{{ messages[0].loud.upper() }}{{ messages[0].sizes }}"
    expected = "({'text': 'p'}, {'name': 'd'}, 3, False, '<object>')A{1: [2.5]}"
    assert ours(template, [message]) == theirs(template, [message]) == expected


def test_the_named_one_of_several_templates_is_rendered() -> None:
    template = ModelTemplate({"default": "plain", "tool_use": "tools", "other": "o"})
    assert template.source(None, has_tools=False) == "plain"
    assert template.source(None, has_tools=True) == "tools"
    assert template.source("other", has_tools=True) == "o"
    assert template.source("{{ 1 }}", has_tools=True) == "{{ 1 }}"
    assert ModelTemplate({"default": "d"}).source(None, has_tools=True) == "d"
    with pytest.raises(ValueError, match="several chat templates, a, b, and no default"):
        ModelTemplate({"b": "", "a": ""}).source(None, has_tools=True)
    with pytest.raises(ValueError, match="no chat template"):
        ModelTemplate().source(None, has_tools=False)
