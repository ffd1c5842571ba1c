"""A gated layer as one kernel: on every path the bits of its product and then of its activation."""

from __future__ import annotations

import pytest
import torch

from lora_serve.ops.contract import Ops
from lora_serve.ops.quantization import INT8
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import override_ops
from tests.ops.cases import normal

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")

# One row; rows and words that no tile divides; blocks of 32 rows and 7 more, in 1 segment and 2.
SHAPES = [(1, 96, 32), (13, 33, 96), (71, 64, 64), (300, 896, 96), (71, 1312, 64)]


@pytest.fixture(params=cpu.usable_paths(), scope="module")
def on_path(request: pytest.FixtureRequest) -> Ops:
    ops: Ops = cpu.load(request.param, 2)
    return ops


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["weight", "bias"])
def test_it_gives_the_bits_of_the_two_kernels(
    on_path: Ops,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    activation: str,
    has_bias: bool,
) -> None:
    rows, in_features, inner = shape
    x = normal(rows, in_features, dtype=dtype)
    weight = normal(2 * inner, in_features, dtype=dtype, seed=1) / 8
    bias = normal(2 * inner, dtype=dtype, seed=2) if has_bias else None
    packed = on_path.linears.pack_linear(weight, bias)
    assert on_path.fuse_gated is not None
    fused = on_path.fuse_gated(packed, activation)
    assert fused is not None
    act_and_mul = getattr(on_path.rowwise, f"{activation}_and_mul")
    expected = act_and_mul(on_path.linears.linear(x, packed))
    assert expected.count_nonzero() > expected.numel() / 2
    assert torch.equal(fused(x), expected)
    assert torch.equal(fused(x[-1:].clone()), expected[-1:])


def test_codes_and_odd_widths_keep_their_two_kernels(on_path: Ops) -> None:
    fuse, weight = on_path.fuse_gated, normal(96, 64, dtype=torch.bfloat16)
    assert fuse is not None
    assert fuse(on_path.linears.pack_linear(weight, None), "silu") is None
    assert on_path.pack_quantized is not None
    codes = on_path.pack_quantized(weight[:64], INT8, None, False)
    assert fuse(codes, "silu") is None


def test_a_swapped_activation_is_not_fused_over(on_path: Ops) -> None:
    swapped = override_ops(on_path, ["silu_and_mul=reference"], {"reference": REFERENCE})
    assert swapped.fuse_gated is None
