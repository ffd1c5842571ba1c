from __future__ import annotations

from typing import Any

import pytest

from lora_serve.check.answers import Answer, MalformedAnswerError, Token, difference, distance


def an_answer(
    *tokens: tuple[str, float], likely: dict[str, float] | None = None, reason: str = "length"
) -> Answer:
    rows = [Token(text, logprob, {text: logprob, **(likely or {})}) for text, logprob in tokens]
    return Answer("".join(text for text, _ in tokens), rows, reason)


RIGHT = an_answer(("a", -0.5), ("b", -1.0))


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (an_answer(("a", -0.5), ("c", -1.0)), "token 2 is 'c' (-1.0), not 'b' (-1.0)"),
        (an_answer(("a", -0.5), ("b", -1.001)), "token 2, 'b', is -1.001, not -1.0"),
        (an_answer(("a", -0.5)), "1 tokens, not 2"),
        (an_answer(("a", -0.5), ("b", -1.0), reason="stop"), "finish_reason is 'stop'"),
        (Answer("axb", RIGHT.tokens, "length"), "character 2: 'xb', not 'b'"),
    ],
)
def test_the_first_difference_is_told(got: Answer, words: str) -> None:
    found = difference(got, RIGHT)
    assert found is not None
    assert words in found.where


def test_equal_answers_differ_in_nothing() -> None:
    assert difference(RIGHT, an_answer(("a", -0.5), ("b", -1.0))) is None


def test_other_likely_tokens_are_a_difference_only_to_the_bit() -> None:
    got = an_answer(("a", -0.5), ("b", -1.0), likely={"z": -3.0})
    assert difference(got, RIGHT) is not None
    assert difference(got, RIGHT, 0.01) is None


def test_a_tolerance_lets_answers_part_where_two_tokens_are_about_as_likely() -> None:
    likely = {"b": -1.0, "c": -1.01}
    got, right = an_answer(("c", -1.01), likely=likely), an_answer(("b", -1.0), likely=likely)
    assert difference(got, right) is not None
    assert difference(got, right, 0.02) is None
    far = {"b": -1.0, "c": -4.0}
    assert difference(an_answer(("c", -4.0), likely=far), right, 0.02) is not None


def test_small_differences_are_told_from_those_of_other_weights() -> None:
    near, far = an_answer(("a", -0.51), ("b", -1.0)), an_answer(("a", -3.5), ("b", -1.0))
    assert getattr(difference(near, RIGHT), "is_rounding", None) is True
    assert getattr(difference(far, RIGHT), "is_rounding", None) is False


def test_part_of_an_answer_may_end_early_but_not_differ() -> None:
    assert difference(an_answer(("a", -0.5)), RIGHT, is_part=True) is None
    assert difference(an_answer(("b", -0.5)), RIGHT, is_part=True) is not None
    assert difference(Answer("x"), RIGHT, is_part=True) is not None
    assert difference(Answer(""), RIGHT, is_part=True) is None


def test_prompt_logprobs_are_compared_but_for_ranks_that_rounding_moves() -> None:
    def told(logprob: float, rank: int) -> Answer:
        rows = [None, {"7": {"logprob": logprob, "rank": rank}}]
        return Answer("a", [], "stop", prompt_logprobs=rows)

    assert difference(told(-1.0, 1), told(-1.0, 1)) is None
    assert "rank is 2, not 1" in getattr(difference(told(-1.0, 2), told(-1.0, 1)), "where", "")
    assert difference(told(-1.01, 2), told(-1.0, 1), 0.1) is None
    assert difference(told(-2.0, 1), told(-1.0, 1), 0.1) is not None
    short = Answer("a", [], "stop", prompt_logprobs=[None])
    assert "1 entries, not 2" in getattr(difference(short, told(-1.0, 1), 0.1), "where", "")


def test_the_distance_of_answers_is_the_largest_up_to_where_they_part() -> None:
    assert distance(RIGHT, an_answer(("a", -2.5))) == 2.0
    assert distance(RIGHT, an_answer(("a", -0.75), ("b", -1.5), ("c", -1.0))) == 0.5
    assert distance(RIGHT, an_answer(("z", -2.5), likely={"a": -3.0})) == 2.5
    assert distance(RIGHT, an_answer(("z", -2.5))) == float("inf")
    assert distance(Answer("same"), Answer("same")) == 0.0


def test_logprobs_are_read_in_the_words_of_both_routes() -> None:
    columns = {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"a": -1, "b": None}]}
    rows = {
        "content": [{"token": "a", "logprob": -1, "top_logprobs": [{"token": "a", "logprob": -1}]}]
    }
    for logprobs in (columns, rows):
        answer = Answer()
        answer.add({"choices": [{"text": "a", "logprobs": logprobs}]})
        assert answer.tokens == [Token("a", -1.0, {"a": -1.0})]


@pytest.mark.parametrize(
    "document",
    [None, 5, [], "text", {}, {"choices": 5}, {"choices": [5]}, {"choices": [{"text": 5}]},
     {"error": {"message": "no"}}],
)  # fmt: skip
def test_what_is_no_answer_is_refused(document: Any) -> None:
    with pytest.raises(MalformedAnswerError):
        Answer().add(document)


@pytest.mark.parametrize(
    "document",
    [
        {"choices": [{"text": None, "logprobs": 5}], "usage": 5},
        {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": 7}}]},
        {"choices": [{"logprobs": {"content": [5, {"top_logprobs": [5]}]}}]},
        {"choices": [], "usage": {"prompt_tokens": True, "prompt_tokens_details": []}},
    ],
)
def test_odd_parts_of_an_answer_are_passed_over(document: Any) -> None:
    answer = Answer()
    answer.add(document)
    assert (answer.text, answer.num_prompt_tokens, answer.num_cached_tokens) == ("", None, None)
