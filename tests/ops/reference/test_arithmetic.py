from __future__ import annotations

import pytest
import torch

from lora_serve.ops.reference.arithmetic import (
    TILE_ROWS,
    exponential,
    multiply_rows,
    pad_rows,
    product,
    row_sum,
    rows_may_share_a_tile,
)
from tests.ops.cases import normal

F32 = torch.float32


def test_exponential_is_right_to_a_ten_millionth() -> None:
    x = torch.linspace(-87, 88, 100_001)
    exact = x.double().exp()
    assert ((exponential(x).double() - exact) / exact).abs().max() < 1.5e-7


def test_exponential_stops_at_its_limits() -> None:
    limits = exponential(torch.tensor([-87.0, 88.0]))
    assert torch.equal(exponential(torch.tensor([-torch.inf, torch.inf])), limits)
    assert exponential(torch.zeros(1)).item() == 1.0


def test_exponential_has_the_same_bits_wherever_an_element_stands() -> None:
    x = normal(97, dtype=F32) * 10
    expected = exponential(x.clone())
    for length, start in [(97, 0), (100, 3), (1000, 501), (70_001, 33_333)]:
        longer = torch.zeros(length)
        longer[start : start + 97] = x
        assert torch.equal(exponential(longer)[start : start + 97], expected)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 100, 256, 896])
def test_row_sum_adds_every_element_once(width: int) -> None:
    x = torch.arange(3 * width, dtype=F32).view(3, width)
    before = x.clone()
    assert torch.equal(row_sum(x), x.double().sum(-1).float())
    assert torch.equal(x, before)


@pytest.mark.parametrize(("n", "k"), [(5, 7), (3, 896), (33, 100), (256, 32), (5000, 24)])
def test_a_products_row_is_the_same_alone_and_in_any_place(n: int, k: int) -> None:
    """On x86 with MKL, (5, 7) is a shape whose rows may not share a tile."""
    x, weight = normal(37, k, dtype=F32), normal(n, k, dtype=F32, seed=1)
    alone = torch.cat([product(row[None], weight) for row in x])
    for start, end in [(0, 37), (1, 18), (9, 36)]:
        assert torch.equal(product(x[start:end], weight), alone[start:end])


def test_multiplying_row_by_row_is_the_same_product() -> None:
    """It serves where rows may not share a tile."""
    rows, weight = pad_rows(normal(20, 24, dtype=F32)), normal(40, 24, dtype=F32, seed=1)
    result = torch.full((len(rows), 40), torch.nan)
    multiply_rows(rows, weight, result)
    torch.testing.assert_close(result, rows @ weight.t())
    moved = torch.empty_like(result)
    multiply_rows(rows.roll(5, 0), weight, moved)
    assert torch.equal(moved.roll(-5, 0), result)


def test_padding_adds_rows_of_zeros_up_to_a_whole_tile() -> None:
    padded = pad_rows(torch.ones(TILE_ROWS + 1, 3, dtype=torch.bfloat16))
    assert padded.shape == (2 * TILE_ROWS, 3)
    assert padded.dtype == F32
    assert padded.sum() == 3 * (TILE_ROWS + 1)


def test_the_check_of_a_shape_is_made_once() -> None:
    rows_may_share_a_tile(31, 17, 1)
    hits = rows_may_share_a_tile.cache_info().hits
    rows_may_share_a_tile(31, 17, 1)
    assert rows_may_share_a_tile.cache_info().hits == hits + 1
