from __future__ import annotations

import pytest

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.formats import reasoning_format, tool_format
from lora_serve.chat.token_kinds import Kind, TokenKinds

QWEN, HERMES = reasoning_format("qwen3", ""), tool_format("hermes", "")
R, C, F = Kind.REASONING, Kind.CONTENT, Kind.CALL
CALL = ["<tool_call>", '{"name": "f", ', '"arguments": {}}', "</tool_call>"]
END = "<|im_end|>"  # a special token, which the text does not have


def kinds(
    texts: list[str], form: AnswerFormat, ending: str = "", *, finds_calls: bool = True
) -> list[Kind]:
    """Kinds of tokens with these texts, one by one and all at once."""
    vocabulary = list(dict.fromkeys(texts))
    token_ids = [vocabulary.index(text) for text in texts]

    def new() -> TokenKinds:
        return TokenKinds(
            form,
            ending,
            lambda token_id: vocabulary[token_id].encode(),
            lambda token_id: vocabulary[token_id] == END,
            finds_calls=finds_calls,
        )

    one_by_one, at_once = new(), new()
    found = [kind for token_id in token_ids for kind in one_by_one.feed([token_id])]
    found += one_by_one.finish()
    assert found == at_once.feed(token_ids) + at_once.finish()
    return found


@pytest.mark.parametrize(
    ("texts", "ending", "expected"),
    [
        (["<think>", "hm", "</think>", "Hi", END], "", [R, R, R, C, C]),
        (["<thi", "nk>", "hm", "</thi", "nk>Hi", "!"], "", [R, R, R, R, R, C]),
        (["hm", "</think>", "Hi"], "<think>\n", [R, R, C]),
        (["<think>", "hm", END], "", [R, R, R]),
        (["\n", "<think>", "hm"], "", [R, R, R]),
        (["\n", "<thin", "ner"], "", [C, C, C]),
        (["Hi", "<think>", "hm"], "", [C, C, C]),
        (["\n", END], "", [C, C]),
        (["Hi", "\n", *CALL, END], "", [C, F, F, F, F, F, F]),
        (["<think>", "hm", "</think>", "\n", *CALL, END], "", [R, R, R, F, F, F, F, F, F]),
        ([*CALL, "Hi", "<", "b"], "", [F, F, F, F, C, C, C]),
        (["é", "<"], "", [C, C]),
    ],
)
def test_each_token_has_the_kind_of_its_text(
    texts: list[str], ending: str, expected: list[Kind]
) -> None:
    assert kinds(texts, AnswerFormat(QWEN, HERMES, {"f": {}}), ending) == expected


def test_calls_are_content_where_they_are_not_looked_for() -> None:
    form = AnswerFormat(QWEN, HERMES, {"f": {}})
    assert kinds(["<think>", "</think>", *CALL], form, finds_calls=False) == [R, R, C, C, C, C]
    assert kinds(CALL, AnswerFormat(QWEN, HERMES)) == [C, C, C, C]


def test_a_forced_answer_is_a_call_from_its_first_token() -> None:
    form = AnswerFormat(QWEN, HERMES, {"f": {}}, called="f")
    assert kinds(["{", "}"], form) == [F, F]
