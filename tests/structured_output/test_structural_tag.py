"""Structural tags mean the same with each library: whole answers, and what is none."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.fuzz.grammars import TAGS
from lora_serve.structured_output.backend import Backend, Vocabulary, load_backend
from lora_serve.structured_output.structural_tag import parse_structural_tag
from lora_serve.structured_outputs import StructuredOutput
from lora_serve.text.tokenizer import Tokenizer
from tests.structured_output.conftest import require_xgrammar

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}
DOT = {"type": "const_string", "value": "."}
TAG = {"type": "tag", "begin": "<f=a>", "content": INTEGER, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<f=b>", "content": DOT, "end": ["!", "?"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG, OTHER]}
SEPARATED = {"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": ", "}
THOUGHT = {"type": "tag", "begin": "<think>", "content": TEXT, "end": "</think>"}
FIRST = {"at_least_one": True}
ONE = {"stop_after_first": True}


def nested(kind: str, **fields: object) -> dict[str, object]:
    return {"type": kind, **fields}


CASES = [
    (DOT, ["."], ["", "..", "a"]),
    (TAG, ["<f=a>17</f>"], ["<f=a>x</f>", "<f=a>17", " <f=a>17</f>", "<f=a>17</f> "]),
    (OTHER, ["<f=b>.!", "<f=b>.?"], ["<f=b>.", "<f=b>.!?"]),
    (nested("regex", pattern="a/b|x\nc"), ["a/b", "x\nc"], ["a", "xc"]),
    (nested("or", elements=[DOT, INTEGER]), [".", "5"], ["", ".5"]),
    (nested("optional", content=TAG), ["", "<f=a>1</f>"], ["<f=a>1</f>" * 2]),
    (nested("star", content=OTHER), ["", "<f=b>.!<f=b>.?"], ["<f=b>"]),
    (nested("plus", content=OTHER), ["<f=b>.!", "<f=b>.!<f=b>.?"], [""]),
    (nested("sequence", elements=[DOT, INTEGER, DOT]), [".5."], [".5", "5."]),
    (nested("sequence", elements=[THOUGHT, TAG]), ["<think>a\n</think><f=a>1</f>"], ["<f=a>1</f>"]),
    (THOUGHT, ["<think></think>", "<think>a <b></think>"], ["<think>", "<think>a</think>b"]),
    (SEPARATED, ["", "<f=b>.!", "<f=b>.!, <f=a>1</f>"], ["<f=b>.! ", "<f=b>.!, "]),
    ({**SEPARATED, **FIRST}, ["<f=b>.!, <f=a>1</f>"], [""]),
    ({**SEPARATED, **ONE}, ["", "<f=a>1</f>"], ["<f=b>.!, <f=a>1</f>"]),
    (
        TRIGGERED,
        ["", "no <f> here", "a <f=a>1</f> b <f=b>.?<f=b>.! c"],
        ["a <f=a>x</f>", "a <f=c>", "a <f=b>.", "<f=a>1"],
    ),
    ({**TRIGGERED, **FIRST}, ["<f=a>1</f>", "<f=a>1</f> b <f=b>.?"], ["", "a"]),
    ({**TRIGGERED, **ONE}, ["", "a", "a <f=a>1</f>"], ["a <f=a>1</f> b", "<f=c>"]),
    ({**TRIGGERED, **FIRST, **ONE}, ["<f=a>1</f>"], ["", "a", "<f=a>1</f> b"]),
    (
        nested("tag", begin="<all>", content=TRIGGERED, end="</all>"),
        ["<all></all>", "<all>a <f=a>1</f> b</all>"],
        ["<all>a <f=a>x</f></all>", "<all></all>a"],
    ),
    (nested("sequence", elements=[DOT, TEXT]), [".", ".a"], ["", "a"]),
]


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(
        tokenizer.to_json(),
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        tokenizer.token_bytes,
        tokenizer.special_token_ids,
    )


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def library(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Backend:
    if request.param == "xgrammar":
        require_xgrammar()
    return load_backend(request.param, vocabulary_of(tokenizer))


def structural_tag(form: object) -> StructuredOutput:
    return StructuredOutput.of(structural_tag={"type": "structural_tag", "format": form})


def matches(library: Backend, tokenizer: Tokenizer, form: object, text: str) -> bool:
    """Whether the text is a whole answer."""
    matcher = library.compile(structural_tag(form)).matcher()
    for token_id in (*tokenizer.encode(text), tokenizer.eos_token_ids[0]):
        if matcher.is_finished:
            return token_id == tokenizer.eos_token_ids[0]
        mask = np.unpackbits(np.frombuffer(matcher.bitmask(), np.uint8), bitorder="little")
        if not mask[token_id]:
            return False
        matcher.accept(token_id)
    return True


@pytest.mark.parametrize(("form", "right", "wrong"), CASES)
def test_an_answer_is_what_its_format_says(
    library: Backend, tokenizer: Tokenizer, form: object, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not matches(library, tokenizer, form, text)] == []
    assert [text for text in wrong if matches(library, tokenizer, form, text)] == []


def test_the_older_notation_is_one_of_tags_in_free_text() -> None:
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    newer = {"type": "structural_tag", "format": {**TRIGGERED, "tags": [TAG]}}
    assert parse_structural_tag(json.dumps(older)) == parse_structural_tag(json.dumps(newer))


def test_fields_that_ask_for_nothing_are_taken() -> None:
    plain = parse_structural_tag(json.dumps({"format": INTEGER}))
    inert = {"style": "json", "any_order": False, "max_whitespace_cnt": None, "excludes": []}
    written = parse_structural_tag(json.dumps({"format": {**INTEGER, **inert}}))
    assert plain.json_schema == written.json_schema  # type: ignore[union-attr]


def deep(levels: int) -> Any:
    form: Any = DOT
    for _ in range(levels):
        form = {**SEPARATED, "tags": [{**TAG, "content": form}, {**OTHER, "content": form}][:1]}
    return form


def test_what_is_nested_is_written_once(library: Backend, tokenizer: Tokenizer) -> None:
    text = "<f=a>" * 30 + "." + "</f>" * 30
    assert matches(library, tokenizer, deep(30), text)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (7, "Expected `object`"),
        (nested("qwen"), "Invalid value 'qwen'"),
        (nested("or", elements=[]), "length >= 1"),
        ({**TRIGGERED, "tags": []}, "length >= 1"),
        ({**TAG, "end": []}, "length >= 1"),
        ({**TEXT, "excludes": ["x"]}, "excludes .* is not supported"),
        ({**TEXT, "max_tokens": 7}, "max_tokens 7 is not supported"),
        ({**INTEGER, "style": "qwen_xml"}, "style qwen_xml is not supported"),
        ({**TEXT, "more": 1}, "unknown field `more`"),
        ({**TRIGGERED, "triggers": ["<g"]}, "starts with none of the triggers"),
        (nested("json_schema", json_schema=False), "schema false"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    tokenizer: Tokenizer, form: object, words: str
) -> None:
    library = load_backend("llguidance", vocabulary_of(tokenizer))
    with pytest.raises(InvalidRequestError, match=words):
        library.compile(structural_tag(form))


def test_a_tag_without_an_end_ends_with_its_answer(tokenizer: Tokenizer) -> None:
    library = load_backend("llguidance", vocabulary_of(tokenizer))
    form = {**TAG, "content": TEXT, "end": ""}
    assert matches(library, tokenizer, form, "<f=a>so")
    assert not matches(library, tokenizer, form, "so")


@pytest.mark.parametrize(
    "form",
    [
        nested("sequence", elements=[TEXT, DOT]),
        nested("star", content=TRIGGERED),
        {**TAG, "content": TEXT, "end": ["", "x"]},
    ],
)
def test_free_text_needs_an_end(tokenizer: Tokenizer, form: object) -> None:
    library = load_backend("llguidance", vocabulary_of(tokenizer))
    with pytest.raises(InvalidRequestError, match="all that is left of the answer"):
        library.compile(structural_tag(form))


@pytest.mark.parametrize("tag", TAGS, ids=lambda tag: tag.text[:40])
def test_the_tags_of_the_fuzzer_are_known_to_both_libraries(
    library: Backend, tag: StructuredOutput
) -> None:
    assert not library.compile(tag).matcher().is_finished
