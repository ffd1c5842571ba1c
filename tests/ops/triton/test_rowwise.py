from __future__ import annotations

import pytest
import torch

from lora_serve.errors import ConfigError
from lora_serve.ops.contract import Ops
from tests.ops.cases import normal
from tests.ops.test_rowwise import (
    test_a_norms_weight_may_be_wider_than_its_rows,
    test_a_wide_weight_is_not_rounded_first,
    test_a_wide_weight_of_narrow_numbers_gives_the_narrow_weights_bits,
    test_add_and_scale_round_once_in_place,
    test_add_rms_norm_adds_in_place_and_norms_the_sum,
    test_embedding_looks_rows_up,
    test_embedding_scales_rows_and_rounds_once,
    test_eps_keeps_a_row_of_zeros_finite,
    test_gelu_tanh_and_mul_gates_the_second_half_by_the_first,
    test_gelu_tanh_has_the_right_limits,
    test_gelu_tanh_works_in_place,
    test_layer_norm_centres_rows_and_divides_by_their_deviation,
    test_rms_norm_divides_by_the_root_mean_square,
    test_silu_and_mul_gates_the_second_half_by_the_first,
    test_silu_has_the_right_limits,
    test_soft_cap_has_the_right_limits,
    test_soft_cap_keeps_small_logits_to_the_last_places,
    test_soft_cap_squeezes_logits_in_place,
)

__all__ = [
    "test_a_norms_weight_may_be_wider_than_its_rows",
    "test_a_wide_weight_is_not_rounded_first",
    "test_a_wide_weight_of_narrow_numbers_gives_the_narrow_weights_bits",
    "test_add_and_scale_round_once_in_place",
    "test_add_rms_norm_adds_in_place_and_norms_the_sum",
    "test_embedding_looks_rows_up",
    "test_embedding_scales_rows_and_rounds_once",
    "test_eps_keeps_a_row_of_zeros_finite",
    "test_gelu_tanh_and_mul_gates_the_second_half_by_the_first",
    "test_gelu_tanh_has_the_right_limits",
    "test_gelu_tanh_works_in_place",
    "test_layer_norm_centres_rows_and_divides_by_their_deviation",
    "test_rms_norm_divides_by_the_root_mean_square",
    "test_silu_and_mul_gates_the_second_half_by_the_first",
    "test_silu_has_the_right_limits",
    "test_soft_cap_has_the_right_limits",
    "test_soft_cap_keeps_small_logits_to_the_last_places",
    "test_soft_cap_squeezes_logits_in_place",
]


def test_norms_and_activation_do_not_depend_on_other_rows(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = normal(9, 100, dtype=dtype) * 3, normal(100, dtype=dtype, seed=1)
    normed, gated = ops.rowwise.rms_norm(x, weight, 1e-6), ops.rowwise.silu_and_mul(x)
    gelu_gated = ops.rowwise.gelu_tanh_and_mul(x)
    for row in (0, 5, 8):
        alone = x[row : row + 1].clone()
        assert torch.equal(ops.rowwise.rms_norm(alone, weight, 1e-6), normed[row : row + 1])
        assert torch.equal(ops.rowwise.silu_and_mul(alone), gated[row : row + 1])
        assert torch.equal(ops.rowwise.gelu_tanh_and_mul(alone), gelu_gated[row : row + 1])


def test_a_row_without_a_slot_is_neither_rotated_nor_written(ops: Ops) -> None:
    q, k, v = (normal(3, 2, 32, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    cache = ops.attention.new_kv_cache(2, 16, 2, 32, torch.bfloat16)
    cache.fill_(7.0)
    before = q.clone()
    angles = normal(9, 32, dtype=torch.float32)
    slots = torch.tensor([-1, 20, -1])
    ops.attention.rotary_and_write_kv(q, k, v, angles, torch.tensor([3, 4, 5]), cache, slots)
    assert torch.equal(q[[0, 2]], before[[0, 2]])
    assert not torch.equal(q[1], before[1])
    written = torch.zeros(2, 16, dtype=torch.bool)
    written[1, 4] = True
    assert (cache.permute(0, 3, 1, 2, 4)[~written] == 7.0).all()
    assert torch.equal(cache[1, 1, :, 4], v[1])


@pytest.mark.parametrize("head_size", [8, 40, 272])
def test_a_head_size_without_tiles_is_refused_by_name(ops: Ops, head_size: int) -> None:
    with pytest.raises(ConfigError, match=f"head size {head_size}"):
        ops.attention.new_kv_cache(1, 16, 1, head_size, torch.bfloat16)
