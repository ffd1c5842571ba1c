from __future__ import annotations

import pytest

from lora_serve.worker.largest_steps import largest_steps


@pytest.mark.parametrize(
    ("num_seqs", "tokens", "longest", "lengths"),
    [(4, 100, 1000, [100]), (4, 100, 40, [40, 40, 20]), (2, 100, 40, [40, 40]), (9, 3, 40, [3])],
)
def test_prompts_fill_the_token_budget_or_all_seats(
    num_seqs: int, tokens: int, longest: int, lengths: list[int]
) -> None:
    prompts, decodes, one = largest_steps(num_seqs, tokens, longest, block_size=16)
    assert [request.num_tokens for request in prompts] == lengths
    assert [request.num_tokens for request in decodes] == [1] * min(num_seqs, tokens)
    assert {request.end for request in decodes} == {longest}
    assert one == decodes[:1]
    for request in (*prompts, *decodes):
        (block_ids,) = request.block_tables
        assert set(block_ids) == {0}
        assert len(block_ids) == -(-request.end // 16)
        (sample,) = request.asked.samples
        assert sample.params.has_penalties  # for which logits are copied
