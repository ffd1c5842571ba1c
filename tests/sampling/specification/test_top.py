from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.sampling.specification.top import comparable, ids_of_top, top_ids

LARGEST = np.finfo(np.float32).max


@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=600),
    k=st.integers(0, 700),
)
def test_the_k_largest_come_in_order_with_the_lowest_id_first_among_equals(
    values: list[int], k: int
) -> None:
    row = np.array(values, np.float32)
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert top_ids(row, k).tolist() == expected


@given(
    values=st.lists(st.sampled_from([-3.0, -0.0, 0.0, 1.0, -np.inf]), min_size=2, max_size=300),
    share=st.floats(0, 1, exclude_max=True),
)
def test_the_ids_of_the_k_largest_are_the_same_without_an_order(
    values: list[float], share: float
) -> None:
    row = np.array(values, np.float32)
    k = max(1, int(share * len(row)))
    assert ids_of_top(row, k).tolist() == sorted(top_ids(row, k).tolist())


@pytest.mark.parametrize("k", [1, 20, 1187, 1188, 5000, 151_936])
def test_a_vocabulary_of_151936_gives_what_sorting_gives(k: int) -> None:
    row = np.random.default_rng(0).standard_normal(151_936).astype(np.float32)
    assert np.array_equal(top_ids(row, k), np.argsort(-row, kind="stable")[:k])


def test_the_last_ids_are_found_although_they_fill_no_group() -> None:
    row = np.zeros(151_936 + 5, np.float32)
    row[-5:] = (1, 5, 3, 4, 2)
    assert top_ids(row, 3).tolist() == [151_937, 151_939, 151_938]


def test_minus_infinity_comes_last() -> None:
    row = np.array([-np.inf, 0.0, -np.inf, 1.0], np.float32)
    assert top_ids(row, 4).tolist() == [3, 1, 0, 2]


def test_a_row_of_numbers_is_taken_as_it_is() -> None:
    row = np.array([1.0, -np.inf, 2.0], np.float32)
    assert comparable(row) is row


def test_nan_becomes_minus_infinity_and_infinity_the_largest_float() -> None:
    row = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert comparable(row).tolist() == [-np.inf, LARGEST, -np.inf, 1.0]
    assert np.isnan(row[0]), "the caller's row was changed"
