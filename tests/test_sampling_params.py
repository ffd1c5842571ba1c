from __future__ import annotations

import re
from array import array

import pytest
from msgspec.structs import replace

from lora_serve.errors import InvalidRequestError
from lora_serve.sampling_params import SamplingParams

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
        SamplingParams(**params).verify(20, VOCAB_SIZE)


def test_as_much_as_is_allowed_is_taken() -> None:
    SamplingParams(
        stop=("a" * 1024,) * 16,
        stop_token_ids=tuple(range(128)),
        logit_bias=dict.fromkeys(range(1024), 1.0),
    ).verify(20, VOCAB_SIZE)


def test_a_stop_token_that_is_named_twice_counts_once() -> None:
    SamplingParams(stop_token_ids=(5,) * 1000).verify(20, VOCAB_SIZE)


def test_what_every_step_asks_for_is_made_once() -> None:
    params = SamplingParams(logit_bias={7: 0.1, 2: -1.5}, stop_token_ids=(3, 4, 3))
    assert params.biased_token_ids == array("q", [7, 2])
    assert params.biases == array("f", [0.1, -1.5])
    assert params.stop_token_id_set == {3, 4}
    for name in ("biased_token_ids", "biases", "stop_token_id_set"):
        assert getattr(params, name) is getattr(params, name)
    assert params == SamplingParams(logit_bias={7: 0.1, 2: -1.5}, stop_token_ids=(3, 4, 3))
    assert replace(params, logit_bias={1: 2.0}).biases == array("f", [2.0]), "its own"
