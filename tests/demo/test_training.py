from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from lora_serve.demo.training import crowd_mask


def test_a_token_in_a_crowd_weighs_as_many_equal_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 1, 3, 8, generator=generator) for _ in range(3))
    crowds = torch.tensor([[4, 1, 1]])
    mask = crowd_mask(crowds)
    assert mask is not None
    crowded = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    repeats = crowds[0]
    spelled_out = scaled_dot_product_attention(
        query[:, :, -1:], keys.repeat_interleave(repeats, 2), values.repeat_interleave(repeats, 2)
    )
    torch.testing.assert_close(crowded[:, :, -1:], spelled_out)


def test_nobody_sees_the_future_through_a_crowd() -> None:
    mask = crowd_mask(torch.tensor([[5, 1, 7]]))
    assert mask is not None
    assert torch.isneginf(mask[0, 0].triu(1)[mask[0, 0].triu(1) != 0]).all()
    assert torch.isfinite(mask[0, 0].tril()).all()


def test_without_crowds_there_is_no_mask_to_pay_for() -> None:
    assert crowd_mask(torch.ones(2, 5, dtype=torch.long)) is None
