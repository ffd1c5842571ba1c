from __future__ import annotations

import pytest
import torch

from lora_serve.ops.contract import Ops
from tests.fakes.threads import num_threads
from tests.ops.cases import assert_close, exact_linear, normal, whole_numbers

SHAPES = [(1, 16), (5, 7), (33, 100), (96, 64), (257, 256), (512, 896)]


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_product_plus_the_bias(
    ops: Ops, dtype: torch.dtype, out_features: int, in_features: int, has_bias: bool
) -> None:
    x = normal(19, in_features, dtype=dtype, seed=1)
    weight = normal(out_features, in_features, dtype=dtype, seed=2)
    bias = normal(out_features, dtype=dtype, seed=3) if has_bias else None
    got = ops.linears.linear(x, ops.linears.pack_linear(weight, bias))
    assert_close(got, exact_linear(x, weight, bias), dtype)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_among_others(
    ops: Ops, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    packed = ops.linears.pack_linear(
        normal(out_features, in_features, dtype=dtype), normal(out_features, dtype=dtype, seed=1)
    )
    x = normal(70, in_features, dtype=dtype, seed=2)
    alone = torch.cat([ops.linears.linear(row[None].clone(), packed) for row in x])
    for start, end in [(0, 70), (0, 2), (3, 19), (5, 38), (69, 70), (1, 65)]:
        assert torch.equal(ops.linears.linear(x[start:end].clone(), packed), alone[start:end])


def test_a_row_has_the_same_bits_with_two_threads(ops: Ops) -> None:
    with num_threads(2):
        packed = ops.linears.pack_linear(normal(257, 256, dtype=torch.float32), None)
        x = normal(40, 256, dtype=torch.float32, seed=2)
        alone = torch.cat([ops.linears.linear(row[None].clone(), packed) for row in x])
        assert torch.equal(ops.linears.linear(x, packed), alone)


def test_a_row_beside_nan_is_untouched(ops: Ops, dtype: torch.dtype) -> None:
    packed = ops.linears.pack_linear(normal(48, 32, dtype=dtype), None)
    x = normal(3, 32, dtype=dtype, seed=1)
    alone = ops.linears.linear(x[1:2].clone(), packed)
    x[0], x[2] = torch.nan, torch.inf
    assert torch.equal(ops.linears.linear(x, packed)[1:2], alone)


def test_linear_rounds_once_and_after_the_bias(ops: Ops, dtype: torch.dtype) -> None:
    """Sums up to 16 * 256 + 1 do not fit bfloat16, so rounding before the bias would show."""
    x = whole_numbers(40, 256, dtype=dtype, most=4, seed=1)
    weight = whole_numbers(64, 256, dtype=dtype, most=4, seed=2)
    bias = whole_numbers(64, dtype=dtype, most=100, seed=3)
    expected = exact_linear(x, weight, bias).to(dtype)
    assert torch.equal(ops.linears.linear(x, ops.linears.pack_linear(weight, bias)), expected)


def test_a_packed_weight_needs_its_source_no_more(ops: Ops, dtype: torch.dtype) -> None:
    weight, x = normal(32, 48, dtype=dtype), normal(5, 48, dtype=dtype, seed=1)
    expected = exact_linear(x, weight, None)
    packed = ops.linears.pack_linear(weight, None)
    del weight
    assert_close(ops.linears.linear(x, packed), expected, dtype)
