from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from lora_serve.demo.recipe import Recipe
from lora_serve.demo.samples import TRUNK, Kind, Row
from lora_serve.demo.tokenizer import train_tokenizer
from lora_serve.demo.training import new_model, row_loss, row_mask, step_shapes


def test_a_token_in_a_crowd_weighs_as_many_equal_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 1, 3, 8, generator=generator) for _ in range(3))
    crowds = torch.tensor([[4, 1, 1]])
    mask = row_mask(crowds, torch.full((1, 3), TRUNK))
    crowded = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    repeats = crowds[0]
    spelled_out = scaled_dot_product_attention(
        query[:, :, -1:], keys.repeat_interleave(repeats, 2), values.repeat_interleave(repeats, 2)
    )
    torch.testing.assert_close(crowded[:, :, -1:], spelled_out)


def test_a_token_sees_the_trunk_and_its_own_branch_but_no_future() -> None:
    mask = row_mask(torch.ones(1, 6, dtype=torch.long), torch.tensor([[TRUNK, TRUNK, 1, 1, 2, 2]]))
    seen = torch.isfinite(mask[0, 0]).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def test_a_branch_is_learnt_as_if_it_stood_alone_behind_the_trunk() -> None:
    recipe = Recipe(num_layers=2, hidden_size=64, intermediate_size=64)
    model = new_model(recipe, train_tokenizer(recipe))

    def loss(*branches: tuple[int, int]) -> float:
        row = Row()
        row.add_to_trunk(list(range(100, 120)), Kind.NOTHING)
        for prompt_id, answer_id in branches:
            row.add_branch([prompt_id, prompt_id], [answer_id, answer_id])
        return row_loss(model, [row]).item()

    both, first, second = loss((5, 6), (7, 8)), loss((5, 6)), loss((7, 8))
    assert abs(both - (first + second) / 2) < 1e-4


def test_now_and_then_a_step_is_long() -> None:
    shapes = step_shapes(seed=7, num_steps=100)
    assert sum(shape.num_trunk_tokens >= 600 for shape in shapes) == 10
    assert shapes == step_shapes(seed=7, num_steps=100)
