from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lora_serve.pooling import LARGEST_VALUE, MAX_ROWS, UNITS
from lora_serve.worker.pooling import ROWS_AT_ONCE, pooled_rows, summed_rows

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def hidden_states(num_rows: int, dtype: torch.dtype) -> Tensor:
    """Values of very different sizes."""
    generator = torch.Generator().manual_seed(num_rows)
    sizes = 10.0 ** torch.randint(-5, 4, (num_rows, 6), generator=generator)
    return (sizes * torch.randn(num_rows, 6, generator=generator)).to(dtype)


@DTYPES
def test_each_sum_is_that_of_the_values_in_units(dtype: torch.dtype) -> None:
    hidden = hidden_states(2 * ROWS_AT_ONCE + 7, dtype)
    expected = [sum(round(value * UNITS) for value in column) for column in hidden.T.tolist()]
    assert summed_rows(hidden).wait().tolist() == [*expected, 0]


@DTYPES
def test_any_cut_into_chunks_gives_the_same_sums(dtype: torch.dtype) -> None:
    hidden = hidden_states(50, dtype)
    whole = summed_rows(hidden).wait()
    for sizes in ([1] * 50, [7, 40, 3], [49, 1]):
        parts = [summed_rows(rows).wait() for rows in hidden.split(sizes)]
        assert torch.equal(sum(parts[1:], parts[0]), whole)


def test_the_mean_is_as_near_the_truth_as_one_in_float32() -> None:
    hidden = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1))
    truth = hidden.double().mean(0)
    mean = summed_rows(hidden).wait()[:-1] / (UNITS * len(hidden))
    assert (mean - truth).abs().max() <= (hidden.mean(0) - truth).abs().max()


def test_values_that_cannot_be_summed_are_counted() -> None:
    hidden = torch.ones(3, 4)
    hidden[0, 0], hidden[1, 1], hidden[2, 1] = math.nan, math.inf, -2 * LARGEST_VALUE
    assert summed_rows(hidden).wait().tolist() == [2 * UNITS, UNITS, 3 * UNITS, 3 * UNITS, 3]


def test_no_sum_of_as_many_rows_as_are_allowed_leaves_64_bits() -> None:
    assert np.iinfo(np.int64).max > MAX_ROWS * LARGEST_VALUE * UNITS
    assert torch.finfo(torch.float16).max <= LARGEST_VALUE


def test_pooled_rows_are_a_copy() -> None:
    hidden = torch.ones(2, 4)
    pooled = pooled_rows(hidden)
    hidden.zero_()
    assert pooled.wait().tolist() == [[1.0] * 4] * 2
