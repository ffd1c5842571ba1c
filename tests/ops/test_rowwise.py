from __future__ import annotations

import pytest
import torch

from lora_serve.ops import Ops
from tests.ops.cases import assert_close, exact_rms_norm, exact_silu_and_mul, normal

WIDTHS = [2, 16, 64, 100, 896]


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_divides_by_the_root_mean_square(ops: Ops, dtype: torch.dtype, width: int) -> None:
    x, weight = normal(11, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    assert_close(ops.rms_norm(x, weight, 1e-6), exact_rms_norm(x, weight, 1e-6), dtype)


def test_heads_are_normed_where_they_lie_in_fused_rows(ops: Ops, dtype: torch.dtype) -> None:
    fused, weight = normal(11, 5, 32, dtype=dtype), normal(32, dtype=dtype, seed=1)
    heads = fused[:, 1:4]
    normed = ops.rms_norm(heads, weight, 1e-6)
    assert normed.is_contiguous()
    assert_close(normed, exact_rms_norm(heads, weight, 1e-6), dtype)
    alone = ops.rms_norm(heads.reshape(-1, 32), weight, 1e-6)
    assert torch.equal(normed.view(-1, 32), alone)


def test_eps_keeps_a_row_of_zeros_finite(ops: Ops, dtype: torch.dtype) -> None:
    zeros, weight = torch.zeros(2, 32, dtype=dtype), torch.ones(32, dtype=dtype)
    assert torch.equal(ops.rms_norm(zeros, weight, 1e-6), zeros)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_adds_in_place_and_norms_the_sum(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    x, residual = normal(11, width, dtype=dtype), normal(11, width, dtype=dtype, seed=1)
    weight = normal(width, dtype=dtype, seed=2)
    total = (x.double() + residual.double()).to(dtype)
    normed = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(normed, exact_rms_norm(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_and_activation_do_not_depend_on_other_rows(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    x, weight = normal(40, width, dtype=dtype) * 3, normal(width, dtype=dtype, seed=1)
    normed = torch.cat([ops.rms_norm(row[None].clone(), weight, 1e-6) for row in x])
    gated = torch.cat([ops.silu_and_mul(row[None].clone()) for row in x])
    for start, end in [(0, 40), (1, 3), (7, 39)]:
        rows = x[start:end].clone()
        assert torch.equal(ops.rms_norm(rows, weight, 1e-6), normed[start:end])
        assert torch.equal(ops.silu_and_mul(rows), gated[start:end])


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul_gates_the_second_half_by_the_first(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    x = normal(11, width, dtype=dtype) * 4
    assert_close(ops.silu_and_mul(x), exact_silu_and_mul(x), dtype)


def test_silu_has_the_right_limits(ops: Ops, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-30000.0, -100.0, 0.0, 100.0, 30000.0]], dtype=dtype)
    x = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    assert_close(ops.silu_and_mul(x), gate.double().clamp(min=0.0), dtype)
