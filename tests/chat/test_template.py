from __future__ import annotations

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.text import tokenizer
from lora_serve.text.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello <x>"}]


def test_a_conversation_is_what_transformers_makes_of_it(byte_level: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(byte_level.source)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    token_ids = byte_level.apply_chat_template(MESSAGES)
    assert token_ids == expected
    assert byte_level.decode(token_ids, skip_special_tokens=False) == (
        "<|start|>system\nBe brief.<|end|>\n<|start|>user\nhello <x><|end|>\n<|start|>assistant\n"
    )


def chat_text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def test_the_last_message_can_be_continued(byte_level: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Sure, "}]
    token_ids = byte_level.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert chat_text(byte_level, token_ids).endswith("<|start|>assistant\nSure, ")


def test_another_template_tools_and_variables_can_be_given(byte_level: Tokenizer) -> None:
    token_ids = byte_level.apply_chat_template(
        MESSAGES, tools=[{"type": "function"}], template_kwargs={"style": "!"}
    )
    assert chat_text(byte_level, token_ids).endswith("1 tools!<|start|>assistant\n")
    token_ids = byte_level.apply_chat_template(
        MESSAGES, chat_template="{{ messages[1]['content'] }}{{ eos_token }}"
    )
    assert chat_text(byte_level, token_ids) == "hello <x><|end|>"


def test_a_model_without_a_template_says_so(sentence_piece: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="has no chat template") as caught:
        sentence_piece.apply_chat_template(MESSAGES)
    assert caught.value.param == "messages"
    assert sentence_piece.apply_chat_template(MESSAGES, chat_template="hello")


@pytest.mark.parametrize(
    ("template", "message", "param"),
    [
        (None, "unknown role mystery", "messages"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str", "messages"),
        ("x\n{% if %}", "chat_template: line 2 is no Jinja: Expected an exp", "chat_template"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe", "messages"),
        ("{{ range(10**9) }}", "Range too big", "messages"),
        ("{{ 1 / 0 }}", "division by zero", "messages"),
    ],
)
def test_what_a_template_raises_is_told(
    byte_level: Tokenizer, template: str | None, message: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        byte_level.apply_chat_template(
            [{"role": "mystery", "content": "x"}], chat_template=template
        )
    assert caught.value.param == param


def test_messages_that_a_template_cannot_continue_are_refused(byte_level: Tokenizer) -> None:
    for messages in ([], [{"role": "user"}]):
        with pytest.raises(InvalidRequestError, match="chat template refused"):
            byte_level.apply_chat_template(
                messages, add_generation_prompt=False, continue_final_message=True
            )


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "conversation", "tools", "self"])
def test_template_variables_cannot_reach_transformers_own_arguments(
    byte_level: Tokenizer, name: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"must not set {name}") as caught:
        byte_level.apply_chat_template(MESSAGES, template_kwargs={name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_without_a_system_role_says_so(byte_level: Tokenizer) -> None:
    """Gemma 2 has such a template."""
    template = (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
    )
    with pytest.raises(InvalidRequestError) as caught:
        byte_level.apply_chat_template(MESSAGES, chat_template=template)
    assert str(caught.value) == (
        "the chat template refused the messages: System role not supported"
    )
    assert caught.value.param == "messages"


def test_rendering_stops_where_its_text_is_too_long(byte_level: Tokenizer) -> None:
    template = "{% for i in range(99999) %}{{ messages[0]['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 1_000_000}]  # 93 GiB in all
    with pytest.raises(PromptTooLongError, match="writes more than 2000000 characters"):
        byte_level.render_chat(messages, chat_template=template, max_chars=2_000_000)


def test_a_text_of_just_the_length_is_rendered(byte_level: Tokenizer) -> None:
    text = byte_level.render_chat(MESSAGES)
    assert byte_level.render_chat(MESSAGES, max_chars=len(text)) == text
    with pytest.raises(PromptTooLongError):
        byte_level.render_chat(MESSAGES, max_chars=len(text) - 1)


ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "over messages": "{% for a in messages %}" * 8 + "{% endfor %}" * 8,
    "in a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "calls": "{% for i in range(99999) %}{{ range(99999)|map('string')|join|length }}{% endfor %}",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_that_would_never_end_is_stopped(
    byte_level: Tokenizer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "SECONDS", 0.2)
    messages = [{"role": "user", "content": "x"}] * 100
    for _ in range(2):  # the second time it is compiled already
        with pytest.raises(InvalidRequestError, match=r"takes more than 0\.2 s of processor time"):
            byte_level.render_chat(messages, chat_template=ENDLESS[kind])
    assert byte_level.render_chat(MESSAGES)


def test_loops_that_are_watched_write_what_they_wrote(byte_level: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.first }}{{ loop.last }} "
        "{{ loop.previtem is defined }}>{{ loop.nextitem is defined }} {{ loop.revindex0 }} "
        "{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}|"
        "{% for k, v in m.items() if k != 'role' %}{{ k }}={{ v }};{% else %}none{% endfor %}"
        "{% endfor %}{% for x in missing %}{% else %}nothing{% endfor %}"
        "{% for a, b in messages[0].items() recursive %}{{ b }}{{ loop({}) if loop.first }}"
        "{% endfor %}{% for c in 'xyz' %}{% if c == 'z' %}{% break %}{% endif %}{{ c }}{% endfor %}"
        "{% for g in messages|map(attribute='content') %}{{ g }}{{ loop.length }}{% endfor %}"
    )
    unwatched = template + "{# as transformers compiles it #}"
    expected = _compile_jinja_template(unwatched).render(messages=MESSAGES)
    assert byte_level.render_chat(MESSAGES, chat_template=template) == expected
    assert len(expected) > 100
