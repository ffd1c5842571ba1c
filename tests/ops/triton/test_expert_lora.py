from __future__ import annotations

from lora_serve.ops.contract import Ops
from tests.ops.test_expert_lora import (
    test_a_plan_has_the_same_shape_whatever_rows_choose,
    test_a_plan_of_the_device_gives_the_bits_of_the_hosts_and_of_a_row_alone,
    test_each_pair_gets_the_delta_of_its_adapters_expert,
)

__all__ = [
    "test_a_plan_has_the_same_shape_whatever_rows_choose",
    "test_a_plan_of_the_device_gives_the_bits_of_the_hosts_and_of_a_row_alone",
    "test_each_pair_gets_the_delta_of_its_adapters_expert",
]


def test_triton_plans_deltas_of_experts_on_the_device(ops: Ops) -> None:
    assert ops.plan_pairs is not None
