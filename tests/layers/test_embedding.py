from __future__ import annotations

import torch

from lora_serve.layers.batch import ForwardBatch
from lora_serve.layers.embedding import Embedding, LMHead
from lora_serve.ops.reference import REFERENCE
from tests.ops.cases import normal

WEIGHT = normal(10, 4, dtype=torch.bfloat16)


def batch(input_ids: list[int], embeds: torch.Tensor | None = None) -> ForwardBatch:
    """Rows of embeds are those whose first value is not 0."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(
        input_ids=torch.tensor(input_ids),
        positions=nothing,
        slot_mapping=(),
        attention=(),
        inputs_embeds=embeds,
        is_embeds=None if embeds is None else embeds[:, 0] != 0,
    )


def test_a_token_is_its_row_of_the_weight() -> None:
    assert torch.equal(Embedding(REFERENCE, WEIGHT)(batch([3, 0, 3])), WEIGHT[[3, 0, 3]])


def test_embeds_stand_where_they_are_marked() -> None:
    embeds = torch.zeros(3, 4, dtype=torch.bfloat16)
    embeds[1] = 5.0
    rows = Embedding(REFERENCE, WEIGHT)(batch([1, 0, 2], embeds))
    assert torch.equal(rows, torch.stack((WEIGHT[1], embeds[1], WEIGHT[2])))


def test_the_rows_may_be_written_to() -> None:
    before = WEIGHT.clone()
    Embedding(REFERENCE, WEIGHT)(batch([1])).add_(1.0)
    assert torch.equal(WEIGHT, before)


def test_logits_are_products_with_the_weight_in_its_type() -> None:
    hidden = normal(2, 4, dtype=torch.bfloat16, seed=1)
    logits = LMHead(REFERENCE, WEIGHT)(hidden)
    assert logits.dtype == WEIGHT.dtype
    torch.testing.assert_close(
        logits.float(), hidden.float() @ WEIGHT.float().t(), rtol=1e-2, atol=1e-2
    )
