from __future__ import annotations

import pytest

from lora_serve.chat.reasoning_parsers.parser import ReasoningParser
from lora_serve.chat.reasoning_parsers.registry import REASONING_FORMATS
from tests.chat.answers import Answer, answer_of

FORMATS = {form.name: form for form in REASONING_FORMATS}
MARKED = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
}


def read(name: str, *pieces: str, is_open: bool = False) -> Answer:
    return answer_of(ReasoningParser(FORMATS[name], is_open=is_open), pieces)


@pytest.mark.parametrize("name", FORMATS)
def test_what_stands_between_the_markers_is_reasoning(name: str) -> None:
    begin, end = MARKED[name]
    answer = read(name, f"{begin}\nFirst,\n\nthen.\n{end}\n\nSo be it.\n")
    assert (answer.reasoning, answer.content) == ("First,\n\nthen.", "So be it.\n")
    answer = read(name, f"\n\n{begin}hm{end}")
    assert (answer.reasoning, answer.content) == ("hm", "")


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_that_the_prompt_began_needs_no_marker(name: str) -> None:
    begin, end = MARKED[name]
    answer = read(name, f"hm\n{end}\n\nyes", is_open=True)
    assert (answer.reasoning, answer.content) == ("hm", "yes")
    answer = read(name, f"{begin}\nhm{end}yes", is_open=True)  # a model may write it all the same
    assert (answer.reasoning, answer.content) == ("hm", "yes")


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_that_never_ends_is_reasoning(name: str) -> None:
    begin, end = MARKED[name]
    answer = read(name, f"{begin}hm {end[:-1]}")
    assert (answer.reasoning, answer.content) == (f"hm {end[:-1]}", "")


@pytest.mark.parametrize("name", FORMATS)
def test_markers_later_in_an_answer_are_content(name: str) -> None:
    begin, end = MARKED[name]
    text = f"One writes {begin} x {end}."
    assert (read(name, text).reasoning, read(name, text).content) == ("", text)
    answer = read(name, f"{begin}a{end}{text}")
    assert (answer.reasoning, answer.content) == ("a", text)


def test_reasoning_is_told_while_it_comes() -> None:
    parser = ReasoningParser(FORMATS["qwen3"], is_open=False)
    assert parser.feed("<thi") == []
    assert [part.text for part in parser.feed("nk>one two\n")] == ["one two"]
    assert [part.text for part in parser.feed("three <")] == ["\nthree "]


def test_a_prompt_opens_reasoning_only_with_its_end() -> None:
    form = FORMATS["qwen3"]
    assert form.is_open_in("<|im_start|>assistant\n<think>\n")
    assert not form.is_open_in("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not form.is_open_in("user: what is <think>?\nassistant:")
