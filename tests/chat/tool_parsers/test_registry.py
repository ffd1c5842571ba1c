from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lora_serve.chat.parts import CallArguments, CallBegin
from tests.chat.answers import CALLS, FORMATS, WAYS, WRITERS, Call, answer_of, tool_parser


def test_each_format_has_a_writer_in_these_tests() -> None:
    assert set(WRITERS) == set(FORMATS)


@pytest.mark.parametrize(("name", "write"), WAYS)
def test_calls_are_read_as_they_were_written(
    name: str, write: Callable[[Sequence[Call]], str]
) -> None:
    for calls in ([call] for call in CALLS):
        answer = answer_of(tool_parser(name), [write(calls)])
        assert (answer.parsed_calls, answer.content) == (calls, "")
    answer = answer_of(tool_parser(name), [write(CALLS)])
    assert (answer.parsed_calls, answer.content) == (CALLS, "")


@pytest.mark.parametrize(("name", "write"), WAYS)
def test_white_space_around_calls_belongs_to_them(
    name: str, write: Callable[[Sequence[Call]], str]
) -> None:
    answer = answer_of(tool_parser(name), ["\n\n", write(CALLS), "\n"])
    assert (answer.parsed_calls, answer.content) == (CALLS, "")


@pytest.mark.parametrize(
    ("name", "write"), [way for way in WAYS if FORMATS[way[0]].markers and "now" not in way[0]]
)
def test_text_before_and_after_calls_is_content(
    name: str, write: Callable[[Sequence[Call]], str]
) -> None:
    text = write(CALLS[:1])
    if not text.startswith(FORMATS[name].markers):
        return
    answer = answer_of(tool_parser(name), ["Let me see.\n", text, "\n", "That is all."])
    assert answer.parsed_calls == CALLS[:1]
    assert answer.content == "Let me see.\nThat is all."


@pytest.mark.parametrize(("name", "write"), WAYS)
def test_a_name_that_is_no_tools_is_content(
    name: str, write: Callable[[Sequence[Call]], str]
) -> None:
    text = write([("launch", {"city": "x"})])
    assert answer_of(tool_parser(name), [text]).calls == []
    assert answer_of(tool_parser(name), [text]).content == text


@pytest.mark.parametrize(("name", "write"), WAYS)
def test_a_call_is_told_while_its_arguments_come(
    name: str, write: Callable[[Sequence[Call]], str]
) -> None:
    text = write([("get_weather", {"city": "x" * 100})])
    if text.index("x" * 100) < text.index("get_weather"):
        return  # arguments before the name
    parser = tool_parser(name)
    half = text.index("x" * 100) + 50
    parts = parser.feed(text[:half])
    assert parts[0] == CallBegin(0, "get_weather")
    assert isinstance(parts[1], CallArguments)
    assert parts[1].text.endswith("x" * 49)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "name": "now", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>now()</tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "now", "argu'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]now[ARG]{}"),
        ("llama3_json", '{"name": "Ada", "parameters": {"age": 36}}'),
        ("llama3_json", '{"a": 1}\n'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[now]"),
        ("qwen3_coder", "<tool_call>\n<function=>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>now()<｜tool▁calls▁end｜>"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    answer = answer_of(tool_parser(name), [text])
    assert (answer.calls, answer.content) == ([], text)


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1,}}', '{"a": 1,', "}}"),
        ("mistral", '[TOOL_CALLS]now{"a": 01} so', '{"a": 01', "} so"),
        ("pythonic", "[now(a=1, b=foo)]", '{"a": 1, "b": ', "foo)]"),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {}]</tool_call>',
            "{}",
            "]</tool_call>",
        ),
    ],
)
def test_a_call_that_breaks_ends_there_and_its_rest_is_content(
    name: str, text: str, arguments: str, content: str
) -> None:
    answer = answer_of(tool_parser(name), [text])
    assert (answer.calls, answer.content) == ([("now", arguments)], content)


def test_a_call_that_breaks_spoils_no_other() -> None:
    text = '<tool_call>{"name": "now", "arguments": {]</tool_call><tool_call>{"x"</tool_call>'
    text += '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    answer = answer_of(tool_parser("hermes"), [text])
    assert answer.calls == [("now", "{"), ("now", "{}")]
    assert answer.content == ']</tool_call><tool_call>{"x"</tool_call>'


def test_values_of_pythonic_calls_are_pythons() -> None:
    text = r"""[now(a='it\'s \x41\u00e4\n', b=(1, 2.5,), c={"k": [True, None]}, d="\d", e=false)]"""
    (call,) = answer_of(tool_parser("pythonic"), [text]).parsed_calls
    expected = {"a": "it's Aä\n", "b": [1, 2.5], "c": {"k": [True, None]}, "d": "\\d", "e": False}
    assert call == ("now", expected)


def test_deep_pythonic_values_are_refused_before_they_overflow_a_stack() -> None:
    answer = answer_of(tool_parser("pythonic"), ["[now(a=" + "[" * 100_000])
    assert answer.calls == [("now", '{"a": ' + "[" * 32)]


def test_values_of_xml_calls_follow_the_tools_schema() -> None:
    def value_of(key: str, text: str) -> object:
        call = f"<tool_call><function=get_weather><parameter={key}>{text}</parameter></function>"
        ((_, arguments),) = answer_of(tool_parser("qwen3_coder"), [call]).parsed_calls
        return arguments[key]

    assert value_of("city", "3") == "3"
    assert value_of("days", "3") == 3
    assert value_of("days", "\nthree\n") == "three"
    assert value_of("is_exact", "True") is True
    assert value_of("city", "\n\nx\n\n") == "\nx\n"
    assert value_of("other", "[1]") == "[1]"
    assert value_of("hours", "[NaN]") == "[NaN]"
