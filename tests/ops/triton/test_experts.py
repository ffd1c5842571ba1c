from __future__ import annotations

import pytest
import torch

from lora_serve.ops.contract import Ops
from tests.ops.cases import normal
from tests.ops.test_experts import (
    IN,
    NUM_CHOSEN,
    choices,
    test_a_gate_says_how_much_is_added,
    test_a_row_takes_its_largest_logits_and_their_shares,
    test_each_pair_is_multiplied_with_its_experts_weight,
    test_logits_that_are_no_numbers_choose_experts_that_exist,
    test_of_equal_logits_the_first_are_taken,
    test_pairs_are_summed_by_their_weights,
    test_rows_of_other_tokens_change_no_bit_of_a_row,
    weights_of,
)

__all__ = [
    "test_a_gate_says_how_much_is_added",
    "test_a_row_takes_its_largest_logits_and_their_shares",
    "test_each_pair_is_multiplied_with_its_experts_weight",
    "test_logits_that_are_no_numbers_choose_experts_that_exist",
    "test_of_equal_logits_the_first_are_taken",
    "test_pairs_are_summed_by_their_weights",
    "test_rows_of_other_tokens_change_no_bit_of_a_row",
]


def test_an_expert_may_take_more_rows_than_a_program_has(ops: Ops, dtype: torch.dtype) -> None:
    """And most experts none: programs beyond the last expert's write nothing."""
    packed = ops.experts.pack_experts([ops.linears.pack_linear(w, None) for w in weights_of(dtype)])
    x, logits = normal(70, IN, dtype=dtype), choices(1, dtype).expand(70, -1)
    chosen = ops.experts.choose(logits, NUM_CHOSEN, True)
    together = ops.experts.linear(x, packed, chosen)
    for row in (0, 69):
        pairs = slice(NUM_CHOSEN * row, NUM_CHOSEN * (row + 1))
        alone = ops.experts.choose(logits[:1], NUM_CHOSEN, True)
        assert torch.equal(ops.experts.linear(x[row : row + 1], packed, alone), together[pairs])


@pytest.mark.parametrize("rows", [1, 3])
def test_the_grid_depends_on_shapes_alone(ops: Ops, rows: int) -> None:
    """So a recorded step serves whatever its tokens choose."""
    from lora_serve.ops.triton.experts import PackedExperts, experts_launch
    from lora_serve.ops.triton.launch import INTERPRETER

    packed = PackedExperts(torch.stack(weights_of(torch.float32)), None)
    x = normal(rows, IN, dtype=torch.float32)
    grids = set()
    for seed in range(4):
        chosen = ops.experts.choose(choices(rows, seed=seed), NUM_CHOSEN, True)
        y = x.new_empty(rows * NUM_CHOSEN, packed.weight.shape[1])
        grids.add(experts_launch(x, packed, chosen, y, INTERPRETER).grid)
    assert len(grids) == 1
