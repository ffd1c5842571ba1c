"""What every parser of tool calls and of reasoning must keep to."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_serve.chat.answer import AnswerParser
from lora_serve.chat.parts import Content, PartCollector, PartParser
from lora_serve.chat.reasoning_parsers.parser import ReasoningParser
from lora_serve.chat.reasoning_parsers.registry import REASONING_FORMATS
from tests.chat.answers import CALLS, FORMATS, WAYS, answer_of, tool_parser

PARSERS: dict[str, Callable[[], PartParser]] = {
    **{name: lambda name=name: tool_parser(name) for name in FORMATS},
    **{
        f"{form.name} {is_open}": lambda form=form, is_open=is_open: ReasoningParser(
            form, is_open=is_open
        )
        for form in REASONING_FORMATS
        for is_open in (False, True)
    },
    "qwen3 hermes": lambda: AnswerParser(
        ReasoningParser(REASONING_FORMATS[2], is_open=False), tool_parser("hermes")
    ),
}
WORDS = [
    *(text for form in FORMATS.values() for text in (*form.markers, *form.special_tokens)),
    *(text for form in REASONING_FORMATS for text in (*form.begins, *form.ends)),
    *"{}[](),;:\"'\\=<>/ \n",
    *('{"name": "now", "arguments": {', '{"parameters": {}, "name": "now"}', "now(", "now"),
    *("get_weather", "city=", "```json\n", "<function=now>", "<parameter=city>", "</parameter>"),
    *("1", "-0.5e+3", "true", "None", "\\u00e4", "\\ud800", "text", "Ω"),
]
GARBAGE = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=25).map("".join)
WRITTEN = st.builds(
    lambda way, calls, before, after: before + way[1](calls) + after,
    st.sampled_from(WAYS),
    st.lists(st.sampled_from(CALLS), min_size=1, max_size=3),
    st.sampled_from(["", "\n", "Let me see.\n", "<think>hm"]),
    st.sampled_from(["", "\n", "}", " and more", "</think>\n\nso"]),
)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Calls, of which a piece is cut out or doubled."""
    text = draw(WRITTEN)
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 12)))
    return text[:start] + draw(st.sampled_from(["", text[start:end] * 2, "?"])) + text[end:]


TEXTS = GARBAGE | WRITTEN | damaged()


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def is_subsequence(short: str, long: str) -> bool:
    rest = iter(long)
    return all(char in rest for char in short)


# To make a text up takes longer than to parse it: each is given to all parsers.
@settings(max_examples=400, deadline=None)
@given(pieces=cut_texts())
def test_how_a_text_is_cut_changes_nothing(pieces: list[str]) -> None:
    text = "".join(pieces)
    for name, parser in PARSERS.items():
        whole = answer_of(parser(), [text])
        assert answer_of(parser(), pieces) == whole, name
        assert answer_of(parser(), text) == whole, name  # character by character


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
def test_no_text_is_lost_and_none_made_up(text: str) -> None:
    for name, parser in PARSERS.items():
        answer = answer_of(parser(), [text])
        if not answer.calls and not answer.reasoning and name in FORMATS:
            assert answer.content == text, name
        assert is_subsequence(answer.content, text), name
        assert is_subsequence(answer.reasoning, text), name
        assert all(called in text for called, _ in answer.calls), name


@pytest.mark.parametrize("name", PARSERS)
def test_no_text_is_read_again_and_again(name: str) -> None:
    """100,000 characters took 0.1 s at most; one that is quadratic takes minutes."""
    for start in ("", "<think>", '<tool_call>{"name": "now", "arguments": {"a": "', "[now(a='"):
        for unit in ("\n", "<", "[", '{"', "<tool_call>", "[TOOL_CALLS]", '"\\', "</", "<th"):
            parser = PARSERS[name]()
            started = time.process_time()
            answer_of(parser, [start + unit * (100_000 // len(unit))])
            assert time.process_time() - started < 3.0


def test_neighbours_of_one_kind_are_one_part() -> None:
    found = PartCollector()
    found.content("a")
    found.content("b")
    assert found.take() == [Content("ab")]
    assert found.take() == []
