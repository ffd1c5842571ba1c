"""Linear layers over codes, on every backend: what they compute, and that rows stay apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_serve.ops.contract import Ops, PackedLinear
from lora_serve.ops.quantization import INT4, INT8, Quantization, quantize
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import quantize_linears
from tests.ops.cases import assert_close, exact_linear, normal, whole_numbers

SHAPES = [(1, 16), (5, 7), (33, 100), (96, 64), (257, 256), (64, 900)]
FULL = [Quantization(INT8), Quantization(INT4)]
EIGHT_BITS = [Quantization(INT8, activations=True), Quantization(INT4, activations=True)]
SHAPED = pytest.mark.parametrize(("out_features", "in_features"), SHAPES)


def packed_normal(
    ops: Ops, quantization: Quantization, shape: tuple[int, int], dtype: torch.dtype
) -> PackedLinear:
    bias = normal(shape[0], dtype=dtype, seed=3)
    return quantize_linears(ops, quantization).linears.pack_linear(
        normal(*shape, dtype=dtype, seed=2), bias
    )


def dequantized(weight: Tensor, quantization: Quantization) -> Tensor:
    return quantize(weight, quantization.weights).dequantized()


@SHAPED
@pytest.mark.parametrize("quantization", FULL, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_product_with_the_dequantised_weight(
    ops: Ops,
    dtype: torch.dtype,
    quantization: Quantization,
    out_features: int,
    in_features: int,
    has_bias: bool,
) -> None:
    x = normal(19, in_features, dtype=dtype, seed=1)
    weight = normal(out_features, in_features, dtype=dtype, seed=2)
    bias = normal(out_features, dtype=dtype, seed=3) if has_bias else None
    packed = quantize_linears(ops, quantization).linears.pack_linear(weight, bias)
    expected = exact_linear(x, dequantized(weight, quantization), bias)
    for rows in (1, 2, 3, 19):
        assert_close(ops.linears.linear(x[:rows].clone(), packed), expected[:rows], dtype)


@SHAPED
@pytest.mark.parametrize("quantization", EIGHT_BITS, ids=str)
def test_activations_in_8_bits_give_the_references_very_bits(
    ops: Ops, dtype: torch.dtype, quantization: Quantization, out_features: int, in_features: int
) -> None:
    x = normal(19, in_features, dtype=dtype, seed=1)
    shape = (out_features, in_features)
    expected = REFERENCE.linears.linear(x, packed_normal(REFERENCE, quantization, shape, dtype))
    assert torch.equal(
        ops.linears.linear(x, packed_normal(ops, quantization, shape, dtype)), expected
    )


@pytest.mark.parametrize("quantization", EIGHT_BITS, ids=str)
def test_activations_in_8_bits_lose_a_hundredth(
    ops: Ops, dtype: torch.dtype, quantization: Quantization
) -> None:
    x, weight = normal(9, 512, dtype=dtype, seed=1), normal(64, 512, dtype=dtype, seed=2)
    got = ops.linears.linear(
        x, quantize_linears(ops, quantization).linears.pack_linear(weight, None)
    ).double()
    exact = exact_linear(x, dequantized(weight, quantization), None)
    assert (got - exact).norm() / exact.norm() < 0.012


@pytest.mark.parametrize("width", [32, 256])
def test_whole_numbers_that_need_no_rounding_come_out_exact(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    """Every group's largest is 127, or 8: scales are 1 and codes the numbers themselves."""
    x = whole_numbers(13, width, dtype=dtype, most=127, seed=1)
    x[:, ::32] = -127
    for quantization, largest in zip(EIGHT_BITS, (127, -8), strict=True):
        weight = whole_numbers(40, width, dtype=dtype, most=7, seed=2)
        weight[:, ::32] = largest
        packed = quantize_linears(ops, quantization).linears.pack_linear(weight, None)
        assert torch.equal(ops.linears.linear(x, packed), exact_linear(x, weight, None).to(dtype))


@SHAPED
@pytest.mark.parametrize("quantization", FULL + EIGHT_BITS, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(
    ops: Ops, dtype: torch.dtype, quantization: Quantization, out_features: int, in_features: int
) -> None:
    packed = packed_normal(ops, quantization, (out_features, in_features), dtype)
    x = normal(70, in_features, dtype=dtype, seed=2)
    x[33] *= 1000  # a scale that took in a neighbour would show
    alone = torch.cat([ops.linears.linear(row[None].clone(), packed) for row in x])
    for start, end in [(0, 70), (0, 2), (3, 19), (5, 38), (69, 70), (30, 34), (1, 65)]:
        assert torch.equal(ops.linears.linear(x[start:end].clone(), packed), alone[start:end])


@pytest.mark.parametrize("quantization", FULL + EIGHT_BITS, ids=str)
def test_what_is_not_finite_stays_in_its_row(
    ops: Ops, dtype: torch.dtype, quantization: Quantization
) -> None:
    packed = packed_normal(ops, quantization, (48, 200), dtype)
    x = normal(4, 200, dtype=dtype, seed=1)
    alone = ops.linears.linear(x[1:2].clone(), packed)
    x[0, 190], x[2, 3], x[3, 5] = torch.nan, torch.inf, -torch.inf
    y = ops.linears.linear(x, packed)
    assert torch.equal(y[1:2], alone)
    assert not y[[0, 2, 3]].isfinite().any()


@pytest.mark.parametrize("quantization", EIGHT_BITS, ids=str)
def test_rows_of_zeros_and_of_next_to_nothing_give_the_bias(
    ops: Ops, quantization: Quantization
) -> None:
    packed = packed_normal(ops, quantization, (20, 64), torch.float32)
    x = torch.zeros(2, 64)
    x[1] = 1e-38
    bias = normal(20, dtype=torch.float32, seed=3)
    assert torch.equal(ops.linears.linear(x, packed), bias.expand(2, -1))


@pytest.mark.parametrize("quantization", FULL + EIGHT_BITS, ids=str)
def test_a_row_needs_no_alignment_and_a_batch_no_rows(
    ops: Ops, dtype: torch.dtype, quantization: Quantization
) -> None:
    packed = packed_normal(ops, quantization, (40, 33), dtype)
    x = normal(7, 33, dtype=dtype)
    whole = ops.linears.linear(x, packed)
    for row in range(7):
        assert torch.equal(ops.linears.linear(x[row : row + 1], packed)[0], whole[row])
    assert ops.linears.linear(x[:0], packed).shape == (0, 40)
