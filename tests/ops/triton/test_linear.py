from __future__ import annotations

import pytest
import torch

from lora_serve.ops.contract import Ops
from lora_serve.ops.triton.backend import load
from lora_serve.ops.triton.launch import Machine
from lora_serve.ops.triton.linear import RESERVED_SHARED_BYTES, linear_launch, pack_linear
from tests.ops.cases import assert_close, exact_linear, normal
from tests.ops.test_linear import (
    test_a_row_beside_nan_is_untouched,
    test_linear_rounds_once_and_after_the_bias,
)

__all__ = [
    "test_a_row_beside_nan_is_untouched",
    "test_linear_rounds_once_and_after_the_bias",
]


@pytest.mark.parametrize(("out_features", "in_features"), [(5, 7), (257, 100)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_product_plus_the_bias(
    ops: Ops, dtype: torch.dtype, out_features: int, in_features: int, has_bias: bool
) -> None:
    x = normal(19, in_features, dtype=dtype, seed=1)
    weight = normal(out_features, in_features, dtype=dtype, seed=2)
    bias = normal(out_features, dtype=dtype, seed=3) if has_bias else None
    got = ops.linears.linear(x, ops.linears.pack_linear(weight, bias))
    assert_close(got, exact_linear(x, weight, bias), dtype)


@pytest.mark.parametrize(
    ("capability", "shared_bytes"), [(80, 166_912), (89, 101_376), (90, 232_448), (120, 101_376)]
)
@pytest.mark.parametrize("num_rows", [1, 64, 65, 8192])
def test_the_stages_of_a_tile_fit_a_cards_shared_memory(
    capability: int, shared_bytes: int, num_rows: int
) -> None:
    """A stage holds a tile of x and one of the weight."""
    meta = torch.device("meta")
    packed = pack_linear(torch.empty(4096, 512, dtype=torch.bfloat16, device=meta), None, meta)
    x = torch.empty(num_rows, 512, dtype=torch.bfloat16, device=meta)
    y = torch.empty(num_rows, 4096, dtype=torch.bfloat16, device=meta)
    for num_multiprocessors in (1, 100, 132):
        machine = Machine(num_multiprocessors, capability, shared_bytes + RESERVED_SHARED_BYTES)
        launch = linear_launch(x, packed, y, machine)
        rows, outs, in_step = (launch.constants[name] for name in ("ROWS", "OUTS", "IN_STEP"))
        assert 2 * (rows + outs) * in_step * launch.num_stages <= shared_bytes


def test_a_row_has_the_same_bits_alone_and_among_others(ops: Ops, dtype: torch.dtype) -> None:
    """Few rows and many take tiles of different shape."""
    packed = ops.linears.pack_linear(normal(300, 100, dtype=dtype), normal(300, dtype=dtype))
    x = normal(150, 100, dtype=dtype, seed=2)
    together = ops.linears.linear(x, packed)
    for start, end in [(0, 1), (70, 71), (5, 64), (100, 149)]:
        assert torch.equal(ops.linears.linear(x[start:end].clone(), packed), together[start:end])


def test_without_the_flag_products_are_the_librarys(ops: Ops) -> None:
    library = load(torch.device("cpu"), batch_invariant=False)
    weight, x = normal(40, 64, dtype=torch.float32), normal(5, 64, dtype=torch.float32, seed=1)
    got = library.linears.linear(x, library.linears.pack_linear(weight, None))
    assert_close(got, exact_linear(x, weight, None), torch.float32)
    assert torch.equal(got, torch.nn.functional.linear(x, weight))
    assert library.numerics != ops.numerics
