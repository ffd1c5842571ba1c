from __future__ import annotations

import math

import numpy as np
import pytest

from lora_serve.errors import InvalidRequestError, RequestFailedError
from lora_serve.pooling import (
    MAX_ROWS,
    MAX_TOKEN_VALUES,
    UNITS,
    PoolingParams,
    embedding,
    sums_added,
)

LAST, MEAN, ALL = (
    PoolingParams(pooling_type=kind, normalize=False) for kind in ("LAST", "MEAN", "ALL")
)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def sums(*values: float, num_unsummed: int = 0) -> bytes:
    return np.array([*(int(value * UNITS) for value in values), num_unsummed], np.int64).tobytes()


def test_the_last_hidden_state_is_given_as_it_is() -> None:
    assert embedding(floats(0.1, -3, 0), LAST, 7) == floats(0.1, -3, 0)


def test_a_normalised_embedding_has_length_1() -> None:
    assert embedding(floats(3, 0, -4), PoolingParams(), 1) == floats(0.6, 0, -0.8)


def test_dimensions_are_cut_before_the_rest_gets_length_1() -> None:
    assert embedding(floats(3, -4, 12), PoolingParams(dimensions=2), 1) == floats(0.6, -0.8)


def test_a_mean_is_the_sum_over_the_tokens_divided_by_their_number() -> None:
    assert embedding(sums(3, -1.5), MEAN, 3) == floats(1, -0.5)
    assert embedding(sums(9, -12), PoolingParams(pooling_type="MEAN"), 3) == floats(0.6, -0.8)


def test_each_token_has_an_embedding_of_its_own() -> None:
    rows = floats(3, -4, 12, 0, 0, 5)
    assert embedding(rows, ALL, 2) == rows
    cut = PoolingParams(pooling_type="ALL", dimensions=2)
    assert embedding(rows, cut, 2) == floats(0.6, -0.8, 0, 0)


def test_zeros_stay_zeros() -> None:
    assert embedding(floats(0, 0), PoolingParams(), 1) == floats(0, 0)


@pytest.mark.parametrize(
    ("pooled", "params"),
    [
        (floats(1, math.nan), PoolingParams()),
        (floats(1, math.inf), LAST),
        (floats(1, math.inf, 1, 1), ALL),
        (sums(1, 2, num_unsummed=1), MEAN),
    ],
)
def test_what_is_no_number_is_no_embedding(pooled: bytes, params: PoolingParams) -> None:
    with pytest.raises(RequestFailedError, match="no finite numbers"):
        embedding(pooled, params, 2)


def test_a_mean_that_fails_names_the_largest_value_that_it_takes() -> None:
    with pytest.raises(RequestFailedError, match=r"or above 65536.*pooling_type LAST"):
        embedding(sums(1, 2, num_unsummed=1), MEAN, 2)


def test_sums_of_disjoint_rows_are_added() -> None:
    added = sums_added(sums(1, 2, num_unsummed=1), sums(0.5, -4, num_unsummed=2))
    assert added == sums(1.5, -2, num_unsummed=3)


def test_parameters_that_do_not_fit_the_model_or_the_prompt_are_refused() -> None:
    PoolingParams(dimensions=8).verify(8, 1)
    for dimensions in (0, -1, 9):
        with pytest.raises(InvalidRequestError, match=rf"\[1, 8\].*got {dimensions}") as caught:
            PoolingParams(dimensions=dimensions).verify(8, 1)
        assert caught.value.param == "dimensions"
    LAST.verify(8, MAX_ROWS + 1)
    MEAN.verify(8, MAX_ROWS)
    with pytest.raises(InvalidRequestError, match=f"{MAX_ROWS} at most"):
        MEAN.verify(8, MAX_ROWS + 1)
    LAST.verify(8, MAX_TOKEN_VALUES)
    ALL.verify(8, MAX_TOKEN_VALUES // 8)
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_TOKEN_VALUES} together"):
        ALL.verify(8, MAX_TOKEN_VALUES // 8 + 1)
