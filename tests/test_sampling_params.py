from __future__ import annotations

import re
from array import array

import pytest
from msgspec.structs import replace

from lora_serve.errors import InvalidRequestError
from lora_serve.sampling_params import SamplingParams

MAX_N = 16
VOCAB_SIZE = 200_000


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ("a",) * 17}, "stop has 17 strings, at most 16 are allowed"),
        (
            {"stop": ("a", "b" * 1025)},
            "stop has 1025 characters in one string, at most 1024 are allowed",
        ),
        (
            {"stop_token_ids": tuple(range(129))},
            "stop_token_ids has 129 different ids, at most 128 are allowed",
        ),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias has 1025 tokens, at most 1024 are allowed",
        ),
    ],
)
def test_what_every_step_would_compute_is_bounded(params: dict, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        SamplingParams(**params).verify(20, VOCAB_SIZE, MAX_N)


def test_as_much_as_is_allowed_is_taken() -> None:
    SamplingParams(
        stop=("a" * 1024,) * 16,
        stop_token_ids=tuple(range(128)),
        logit_bias=dict.fromkeys(range(1024), 1.0),
    ).verify(20, VOCAB_SIZE, MAX_N)


def test_a_stop_token_that_is_named_twice_counts_once() -> None:
    SamplingParams(stop_token_ids=(5,) * 1000).verify(20, VOCAB_SIZE, MAX_N)


def test_what_every_step_asks_for_is_made_once() -> None:
    params = SamplingParams(logit_bias={7: 0.1, 2: -1.5}, stop_token_ids=(3, 4, 3))
    assert params.biased_token_ids == array("q", [7, 2])
    assert params.biases == array("f", [0.1, -1.5])
    assert params.stop_token_id_set == {3, 4}
    for name in ("biased_token_ids", "biases", "stop_token_id_set"):
        assert getattr(params, name) is getattr(params, name)
    assert params == SamplingParams(logit_bias={7: 0.1, 2: -1.5}, stop_token_ids=(3, 4, 3))
    assert replace(params, logit_bias={1: 2.0}).biases == array("f", [2.0]), "its own"


def test_the_whole_vocabulary_is_told_where_the_server_allows_it() -> None:
    asked = SamplingParams(logprobs=-1, prompt_logprobs=-1)
    for max_logprobs in (-1, 50, 60):
        asked.verify(max_logprobs, vocab_size=50, max_n=MAX_N)
    assert asked.with_num_logprobs(50) == SamplingParams(logprobs=50, prompt_logprobs=50)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidRequestError, match=f"{name} must be .* got -1.*--max-logprobs"):
            SamplingParams(**{name: -1}).verify(20, vocab_size=50, max_n=MAX_N)
        with pytest.raises(InvalidRequestError, match="got 51"):
            SamplingParams(**{name: 51}).verify(-1, vocab_size=50, max_n=MAX_N)


def test_listed_tokens_are_as_many_logprobs_whatever_max_logprobs_is() -> None:
    asked = SamplingParams(logprob_token_ids=(4, 9, 2))
    asked.verify(0, vocab_size=50, max_n=MAX_N)
    assert asked.with_num_logprobs(50) == replace(asked, logprobs=3)
    for logprobs in (0, 2, 3, 5):
        other = replace(asked, logprobs=logprobs)
        other.verify(0, vocab_size=50, max_n=MAX_N)
        assert other.with_num_logprobs(50).logprobs == 3
    for refused, message in (
        ({"logprob_token_ids": (50,)}, "token 50, which is out of vocabulary"),
        ({"logprob_token_ids": tuple(range(129))}, "has 129 ids, at most 128"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            replace(asked, **refused).verify(0, vocab_size=50, max_n=MAX_N)


@pytest.mark.parametrize(
    ("max_logprobs", "allowed"),
    [
        (-1, r"in \[0, 50\], or -1 for"),
        (50, r"in \[0, 50\], or -1 for"),
        (20, r"in \[0, 20\], got"),
    ],
)
def test_a_refusal_of_logprobs_tells_all_that_is_allowed(max_logprobs: int, allowed: str) -> None:
    with pytest.raises(InvalidRequestError, match=allowed):
        SamplingParams(logprobs=-2).verify(max_logprobs, vocab_size=50, max_n=MAX_N)
