from __future__ import annotations

import math

import pytest
import torch

from lora_serve.sampling.specification.logprobs import token_logprobs

VOCAB_SIZE = 1000


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 5


def test_logprobs_are_those_of_torch_in_float64() -> None:
    logits = random_logits(6)
    expected = torch.log_softmax(logits.double(), -1)
    for row, found in enumerate(token_logprobs(logits, [5] * 6, 4)):
        assert found.token_id == 5
        assert found.logprob == pytest.approx(expected[row, 5].item(), abs=1e-6)
        assert found.rank == 1 + int((logits[row] > logits[row, 5]).sum())
        values, ids = expected[row].topk(4)
        assert [token_id for token_id, _ in found.top] == ids.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_the_same_token_has_the_same_logprob_in_and_out_of_the_top() -> None:
    logits = random_logits(1)
    greedy = int(logits.argmax())
    (found,) = token_logprobs(logits, [greedy], 3)
    assert found.rank == 1
    assert found.top[0] == (greedy, found.logprob)


def test_zero_alternatives_list_none() -> None:
    (found,) = token_logprobs(random_logits(1), [0], 0)
    assert found.top == ()


def test_more_alternatives_than_tokens_list_all_of_them() -> None:
    (found,) = token_logprobs(torch.zeros(1, 5), [0], 20)
    assert [token_id for token_id, _ in found.top] == [0, 1, 2, 3, 4]


def test_a_row_has_the_same_logprobs_alone_and_among_others() -> None:
    logits = random_logits(9)
    together = token_logprobs(logits, list(range(9)), 5)
    for row in range(9):
        assert token_logprobs(logits[row : row + 1], [row], 5) == [together[row]]


def test_an_impossible_token_has_minus_infinity_and_others_stay_numbers() -> None:
    (found,) = token_logprobs(torch.tensor([[0.0, -math.inf, 0.0]]), [1], 3)
    assert found.logprob == -math.inf
    assert found.rank == 3
    assert found.top == ((0, -math.log(2)), (2, -math.log(2)), (1, -math.inf))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_row_without_any_number_gives_minus_infinity(value: float) -> None:
    (found,) = token_logprobs(torch.full((1, 4), value), [2], 2)
    assert found.logprob == -math.inf
    assert found.top == ((0, -math.inf), (1, -math.inf))


def test_an_infinite_logit_takes_all_the_probability() -> None:
    (found,) = token_logprobs(torch.tensor([[0.0, math.inf, 1.0]]), [1], 1)
    assert found.logprob == 0.0
    assert found.top == ((1, 0.0),)
