from __future__ import annotations

import pytest
import torch

from lora_serve.errors import AdapterError
from lora_serve.ops.contract import LoRAPart, Ops
from lora_serve.ops.triton import lora as lora_module
from tests.ops.cases import assert_close, exact_lora, normal
from tests.ops.test_lora import (
    IN,
    OUT,
    apply,
    q_and_v,
    test_a_linear_layer_without_parts_is_left_alone,
    test_each_segment_gets_its_own_delta,
    test_rows_and_columns_without_an_adapter_keep_their_bits,
    test_the_hidden_stays_float32_and_the_sum_is_rounded_once,
)

__all__ = [
    "test_a_linear_layer_without_parts_is_left_alone",
    "test_each_segment_gets_its_own_delta",
    "test_rows_and_columns_without_an_adapter_keep_their_bits",
    "test_the_hidden_stays_float32_and_the_sum_is_rounded_once",
]

BF16 = torch.bfloat16


@pytest.mark.parametrize("rank", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_a_rows_delta_does_not_depend_on_its_batch(ops: Ops, dtype: torch.dtype, rank: int) -> None:
    x, y = normal(100, IN, dtype=dtype), normal(100, OUT, dtype=dtype, seed=1)
    mine, other = q_and_v(dtype, rank, seed=3), q_and_v(dtype, 24, seed=7)
    whole = apply(ops, y, x, [(0, 100, mine)])
    for row in (0, 63, 64, 99):
        rows = slice(row, row + 1)
        assert torch.equal(apply(ops, y[rows], x[rows], [(0, 1, mine)]), whole[rows])
    mixed = apply(ops, y, x, [(0, 7, other), (7, 8, mine), (8, 20, other), (20, 100, mine)])
    assert torch.equal(mixed[7:8], whole[7:8])
    assert torch.equal(mixed[20:], whole[20:])


def wide_adapter(ops: Ops) -> tuple[list[LoRAPart], object]:
    """An adapter of one layer with 2100 inputs: three spans, the last of them short."""
    part = LoRAPart(normal(20, 2100, dtype=BF16), normal(70, 20, dtype=BF16, seed=1), 0.5, 0)
    return [part], ops.adapters.pack_adapter([[part]])


def test_spans_summed_in_a_row_give_the_bits_of_spans_summed_apart(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, adapter = wide_adapter(ops)
    x, y = normal(3, 2100, dtype=BF16), normal(3, 70, dtype=BF16, seed=2)
    apart, in_a_row = y.clone(), y.clone()
    plan = ops.adapters.plan_lora([(0, 3, adapter)], 3)
    ops.adapters.lora(apart, x, plan, 0)
    monkeypatch.setattr(lora_module, "MAX_TILES_APART", 0)
    ops.adapters.lora(in_a_row, x, plan, 0)
    assert_close(apart, y.double() + exact_lora(x, parts, 70), BF16)
    assert torch.equal(in_a_row, apart)


def test_a_plan_that_is_filled_again_gives_the_same_bits(ops: Ops) -> None:
    _, adapter = wide_adapter(ops)
    x, y = normal(4, 2100, dtype=BF16), normal(4, 70, dtype=BF16, seed=2)
    expected = y.clone()
    ops.adapters.lora(expected, x, ops.adapters.plan_lora([(1, 3, adapter)], 4), 0)
    plans = ops.graph_plans
    assert plans is not None
    plan = plans.new_lora_plan(4)
    got = y.clone()
    ops.adapters.lora(got, x, plan, 0)
    assert torch.equal(got, y), "a plan without requests changed rows"
    for _ in range(2):
        plans.fill_lora_plan(plan, [(1, 3, adapter)])
        got = y.clone()
        ops.adapters.lora(got, x, plan, 0)
        assert torch.equal(got, expected)
    plans.fill_lora_plan(plan, [])
    got = y.clone()
    ops.adapters.lora(got, x, plan, 0)
    assert torch.equal(got, y)


def test_ranks_beyond_what_is_reserved_are_refused_by_number(ops: Ops) -> None:
    part = LoRAPart(torch.zeros(1544, 8, dtype=BF16), torch.zeros(8, 1544, dtype=BF16), 1.0, 0)
    with pytest.raises(AdapterError, match="1544"):
        ops.adapters.pack_adapter([[part]])
