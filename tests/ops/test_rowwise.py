from __future__ import annotations

import pytest
import torch

from lora_serve.ops.contract import Ops
from tests.ops.cases import (
    assert_close,
    exact_gelu_tanh_and_mul,
    exact_layer_norm,
    exact_rms_norm,
    exact_silu_and_mul,
    exact_soft_cap,
    normal,
)

WIDTHS = [2, 16, 64, 100, 896]


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_divides_by_the_root_mean_square(ops: Ops, dtype: torch.dtype, width: int) -> None:
    x, weight = normal(11, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    assert_close(ops.rowwise.rms_norm(x, weight, 1e-6), exact_rms_norm(x, weight, 1e-6), dtype)


def test_heads_are_normed_where_they_lie_in_fused_rows(ops: Ops, dtype: torch.dtype) -> None:
    fused, weight = normal(11, 5, 32, dtype=dtype), normal(32, dtype=dtype, seed=1)
    heads = fused[:, 1:4]
    normed = ops.rowwise.rms_norm(heads, weight, 1e-6)
    assert normed.is_contiguous()
    assert_close(normed, exact_rms_norm(heads, weight, 1e-6), dtype)
    alone = ops.rowwise.rms_norm(heads.reshape(-1, 32), weight, 1e-6)
    assert torch.equal(normed.view(-1, 32), alone)


def test_eps_keeps_a_row_of_zeros_finite(ops: Ops, dtype: torch.dtype) -> None:
    zeros, weight = torch.zeros(2, 32, dtype=dtype), torch.ones(32, dtype=dtype)
    assert torch.equal(ops.rowwise.rms_norm(zeros, weight, 1e-6), zeros)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_adds_in_place_and_norms_the_sum(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    x, residual = normal(11, width, dtype=dtype), normal(11, width, dtype=dtype, seed=1)
    weight = normal(width, dtype=dtype, seed=2)
    total = (x.double() + residual.double()).to(dtype)
    normed = ops.rowwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(normed, exact_rms_norm(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_centres_rows_and_divides_by_their_deviation(
    ops: Ops, dtype: torch.dtype, width: int, with_bias: bool
) -> None:
    """Far from 0, where a variance taken from the mean of squares would cancel."""
    x = normal(11, width, dtype=dtype) + 3
    weight = normal(width, dtype=dtype, seed=1)
    bias = normal(width, dtype=dtype, seed=2) if with_bias else None
    got = ops.rowwise.layer_norm(x, weight, bias, 0.1)
    assert_close(got, exact_layer_norm(x, weight, bias, 0.1), dtype)
    alone = [ops.rowwise.layer_norm(row[None].clone(), weight, bias, 0.1) for row in x]
    assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("width", WIDTHS)
def test_add_and_scale_round_once_in_place(ops: Ops, dtype: torch.dtype, width: int) -> None:
    x, residual = normal(11, width, dtype=dtype), normal(11, width, dtype=dtype, seed=1)
    total = (x.double() + residual.double()).to(dtype)
    assert ops.rowwise.add(x, residual) is residual
    assert torch.equal(residual, total)
    factor = torch.tensor(0.22).item()  # a float32 number
    scaled = (x.double() * factor).to(dtype)
    assert ops.rowwise.scale(x, factor) is x
    assert torch.equal(x, scaled)


@pytest.mark.parametrize("width", WIDTHS)
def test_gelu_tanh_works_in_place(ops: Ops, dtype: torch.dtype, width: int) -> None:
    x = normal(11, width, dtype=dtype) * 4
    ones = torch.cat((x, torch.ones_like(x)), dim=-1)
    gated = ops.rowwise.gelu_tanh_and_mul(ones)
    alone = torch.cat([ops.rowwise.gelu_tanh(row[None].clone()) for row in x])
    assert ops.rowwise.gelu_tanh(x) is x
    assert torch.equal(x, gated)
    assert torch.equal(x, alone)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_and_activation_do_not_depend_on_other_rows(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    x, weight = normal(40, width, dtype=dtype) * 3, normal(width, dtype=dtype, seed=1)
    normed = torch.cat([ops.rowwise.rms_norm(row[None].clone(), weight, 1e-6) for row in x])
    gated = torch.cat([ops.rowwise.silu_and_mul(row[None].clone()) for row in x])
    gelu_gated = torch.cat([ops.rowwise.gelu_tanh_and_mul(row[None].clone()) for row in x])
    for start, end in [(0, 40), (1, 3), (7, 39)]:
        rows = x[start:end].clone()
        assert torch.equal(ops.rowwise.rms_norm(rows, weight, 1e-6), normed[start:end])
        assert torch.equal(ops.rowwise.silu_and_mul(rows), gated[start:end])
        assert torch.equal(ops.rowwise.gelu_tanh_and_mul(rows), gelu_gated[start:end])


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul_gates_the_second_half_by_the_first(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    x = normal(11, width, dtype=dtype) * 4
    assert_close(ops.rowwise.silu_and_mul(x), exact_silu_and_mul(x), dtype)


def test_silu_has_the_right_limits(ops: Ops, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-30000.0, -100.0, 0.0, 100.0, 30000.0]], dtype=dtype)
    x = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    assert_close(ops.rowwise.silu_and_mul(x), gate.double().clamp(min=0.0), dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_gelu_tanh_and_mul_gates_the_second_half_by_the_first(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    x = normal(11, width, dtype=dtype) * 4
    assert_close(ops.rowwise.gelu_tanh_and_mul(x), exact_gelu_tanh_and_mul(x), dtype)


def test_gelu_tanh_has_the_right_limits(ops: Ops, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-30000.0, -100.0, 0.0, 100.0, 30000.0]], dtype=dtype)
    x = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    assert_close(ops.rowwise.gelu_tanh_and_mul(x), gate.double().clamp(min=0.0), dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_norms_weight_may_be_wider_than_its_rows(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    """A weight of 1 + w has bits that the rows' dtype would lose, and the result shows them."""
    x, residual = normal(11, width, dtype=dtype), normal(11, width, dtype=dtype, seed=1)
    weight = 1 + normal(width, dtype=torch.float32, seed=2) / 50
    assert_close(ops.rowwise.rms_norm(x, weight, 1e-6), exact_rms_norm(x, weight, 1e-6), dtype)
    total = (x.double() + residual.double()).to(dtype)
    expected = ops.rowwise.rms_norm(total, weight, 1e-5)
    assert torch.equal(ops.rowwise.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, total)


def test_a_wide_weight_of_narrow_numbers_gives_the_narrow_weights_bits(
    ops: Ops, dtype: torch.dtype
) -> None:
    x, weight = normal(11, 100, dtype=dtype), normal(100, dtype=dtype, seed=1)
    assert torch.equal(
        ops.rowwise.rms_norm(x, weight.float(), 1e-6), ops.rowwise.rms_norm(x, weight, 1e-6)
    )


def test_a_wide_weight_is_not_rounded_first(ops: Ops) -> None:
    """A row of equal numbers, whose norm is the weight itself: 1 + 2^-8 + 2^-16 rounds up."""
    x = torch.full((1, 64), 8.0, dtype=torch.bfloat16)
    weight = torch.full((64,), 1 + 2**-8 + 2**-16)
    assert weight.bfloat16()[0] == 1 + 2**-7
    x[0, ::2] *= 1 - 2**-7
    got, exact = ops.rowwise.rms_norm(x, weight, 0.0), exact_rms_norm(x, weight, 0.0)
    assert torch.equal(got, exact.to(torch.bfloat16))


def test_embedding_looks_rows_up(ops: Ops, dtype: torch.dtype) -> None:
    weight, ids = normal(40, 100, dtype=dtype), torch.tensor([3, 39, 0, 3])
    rows = ops.rowwise.embed(weight, ids, None)
    assert torch.equal(rows, weight[ids])
    rows.zero_()
    assert weight[ids].any()


@pytest.mark.parametrize("width", WIDTHS)
def test_embedding_scales_rows_and_rounds_once(ops: Ops, dtype: torch.dtype, width: int) -> None:
    weight, ids = normal(40, width, dtype=dtype), torch.arange(39, -1, -1)
    before = weight.clone()
    scale = torch.tensor(width**0.5 * 7).to(dtype).item()
    expected = (weight[ids].double() * scale).to(dtype)
    assert torch.equal(ops.rowwise.embed(weight, ids, scale), expected)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("cap", [0.3, 30.0])
def test_soft_cap_squeezes_logits_in_place(
    ops: Ops, dtype: torch.dtype, cap: float, width: int
) -> None:
    logits = normal(11, width, dtype=dtype) * cap
    logits[::3] /= 100
    exact = exact_soft_cap(logits, cap)
    alone = torch.cat([ops.rowwise.soft_cap(row[None].clone(), cap) for row in logits])
    got = ops.rowwise.soft_cap(logits, cap)
    assert got is logits
    assert_close(got, exact, dtype)
    assert torch.equal(got, alone)


def test_soft_cap_has_the_right_limits(ops: Ops, dtype: torch.dtype) -> None:
    large = torch.tensor([[-torch.inf, -3e4, -400.0, 0.0, 400.0, 3e4, torch.inf]], dtype=dtype)
    expected = torch.tensor([[-30.0, -30.0, -30.0, 0.0, 30.0, 30.0, 30.0]], dtype=dtype)
    assert torch.equal(ops.rowwise.soft_cap(large, 30.0), expected)
    assert ops.rowwise.soft_cap(torch.tensor([[torch.nan]], dtype=dtype), 30.0).isnan().all()


def test_soft_cap_keeps_small_logits_to_the_last_places(ops: Ops) -> None:
    """1 - 2 / (e^2x + 1) would lose most of them."""
    logits = normal(1, 896, dtype=torch.float32).sign() * torch.logspace(-12, 0, 896)
    exact = exact_soft_cap(logits, 30.0)
    got = ops.rowwise.soft_cap(logits, 30.0)
    assert ((got.double() - exact).abs() <= 1e-6 * exact.abs()).all()
