from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lora_serve.sampling.specification.draw import draw_token
from lora_serve.sampling.specification.philox import RANDOM_BITS
from lora_serve.sampling_params import SamplingParams

VOCAB_SIZE = 48
GRID = 256


def probabilities_of_transformers(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    scores = TemperatureLogitsWarper(params.temperature)(None, torch.from_numpy(row)[None])
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return torch.softmax(scores[0], -1).numpy()


def at(uniform: float) -> int:
    """The random number whose place in the CDF is `uniform`."""
    return int(uniform * 2**RANDOM_BITS)


def probabilities_drawn(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Share of an even grid of uniforms that draws each token: exact to one grid step."""
    tokens = [draw_token(row, params, at((i + 0.5) / GRID)) for i in range(GRID)]
    return np.bincount(tokens, minlength=len(row)) / GRID


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, -1, 1, 7, 60]),
        top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
        min_p=st.sampled_from([0.0, 0.02, 0.4]),
    ),
)
def test_tokens_are_as_likely_as_transformers_makes_them(
    seed: int, scale: float, params: SamplingParams
) -> None:
    row = np.random.default_rng(seed).standard_normal(VOCAB_SIZE).astype(np.float32) * scale
    expected = probabilities_of_transformers(row, params)
    np.testing.assert_allclose(probabilities_drawn(row, params), expected, atol=1.5 / GRID)


@pytest.mark.parametrize(
    ("top_p", "scale"),
    [
        (0.999, 0.01),
        (0.5, 1.0),
        (0.1, 6.0),
        *(
            pytest.param(top_p, scale, marks=pytest.mark.slow)
            for top_p in (0.1, 0.5, 0.9, 0.999)
            for scale in (0.01, 1.0, 6.0)
        ),
    ],
)
def test_the_nucleus_of_a_large_vocabulary_ends_where_sorting_says(
    top_p: float, scale: float
) -> None:
    row = np.random.default_rng(1).standard_normal(151_936).astype(np.float32) * np.float32(scale)
    order = np.argsort(-row, kind="stable")
    cdf = np.cumsum(np.exp(row[order].astype(np.float64) - row.max()))
    size = 1 + int(np.searchsorted(cdf, top_p * cdf[-1]))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    params = SamplingParams(top_p=top_p)
    drawn = {draw_token(row, params, at((i + 0.5) / 50)) for i in range(50)}
    assert max(rank[token] for token in drawn) < size + size // 1000 + 1
    if size < 100:
        assert {int(rank[token]) for token in drawn} <= set(range(size))


def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_equals() -> None:
    row = np.zeros(20, np.float32)
    row[15] = 1.0
    drawn = probabilities_drawn(row, SamplingParams(top_k=3))
    assert np.flatnonzero(drawn).tolist() == [0, 1, 15]


def test_top_p_keeps_the_lowest_ids_among_equals() -> None:
    drawn = probabilities_drawn(np.zeros(20, np.float32), SamplingParams(top_p=0.25))
    assert np.flatnonzero(drawn).tolist() == [0, 1, 2, 3, 4]


def test_the_smallest_top_p_keeps_the_most_likely_token() -> None:
    row = np.array([0.0, 2.0, 2.0, 1.0], np.float32)
    assert probabilities_drawn(row, SamplingParams(top_p=1e-12)).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("vocab_size", [3, 512, 513, 2048, 2049])
def test_a_token_of_no_weight_is_never_drawn(uniform: float, vocab_size: int) -> None:
    row = np.full(vocab_size, -np.inf, np.float32)
    row[1:-1] = -200.0  # e^-200 is 0 in float32
    row[vocab_size // 2] = 0.0
    assert draw_token(row, SamplingParams(), at(uniform)) == vocab_size // 2


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_token() -> None:
    row = np.zeros(151_936, np.float32)
    row[0] = row[-1] = -np.inf
    assert draw_token(row, SamplingParams(), at(0.0)) == 1
    assert draw_token(row, SamplingParams(), at(1 - 2**-53)) == 151_934


def test_the_lowest_temperature_above_greedy_draws_the_most_likely() -> None:
    row = np.array([1e30, 3e38, -3e38, 2.9e38], np.float32)
    with np.errstate(over="ignore"):
        assert draw_token(row, SamplingParams(temperature=1e-5), at(0.999)) == 1


def test_the_row_is_not_changed() -> None:
    row = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    before = row.copy()
    draw_token(row, SamplingParams(top_p=0.5, min_p=0.1, top_k=50, temperature=0.5), at(0.3))
    assert np.array_equal(row, before)
