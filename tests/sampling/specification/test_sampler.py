from __future__ import annotations

import math
import random

import pytest
import torch

from lora_serve.sampling.specification.sampler import sample
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput
from tests.fakes.seen_tokens import seen_tokens

VOCAB_SIZE = 997  # no multiple of a vector's width
GREEDY = SamplingParams(temperature=0.0)

PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.3, top_p=0.95, logprobs=0),
    SamplingParams(min_p=0.1, logit_bias={3: 9.0}, logprobs=5),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5),
]


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 3


def random_inputs(num_rows: int) -> list[SampleInput]:
    rng = random.Random(3)
    return [
        SampleInput(
            params=rng.choice(PARAMS),
            seed=rng.randrange(-(2**63), 2**63),
            position=rng.randrange(5000),
            seen=seen_tokens(
                [rng.randrange(VOCAB_SIZE) for _ in range(30)],
                [rng.randrange(VOCAB_SIZE) for _ in range(10)],
            ),
            banned_token_ids=[rng.randrange(VOCAB_SIZE)],
        )
        for _ in range(num_rows)
    ]


def test_a_row_gets_the_same_alone_among_others_and_wherever_it_lies_in_memory() -> None:
    logits, inputs = random_logits(40), random_inputs(40)
    together = sample(logits, inputs)
    backwards = sample(logits.flip(0), inputs[::-1])[::-1]
    alone = [sample(logits[i : i + 1].clone(), inputs[i : i + 1])[0] for i in range(40)]
    padded = torch.zeros(40, VOCAB_SIZE + 3)
    padded[:, 1 : 1 + VOCAB_SIZE] = logits
    shifted = sample(padded[:, 1 : 1 + VOCAB_SIZE], inputs)
    assert together == backwards == alone == shifted


def test_the_number_of_threads_does_not_matter() -> None:
    logits, inputs = random_logits(20), random_inputs(20)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = sample(logits, inputs)
    finally:
        torch.set_num_threads(before)
    assert one == sample(logits, inputs)


def test_greedy_takes_the_lowest_id_of_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 0.0]])
    assert sample(logits, [SampleInput(GREEDY, 0, 0)]) == [(1, None)]


def test_a_temperature_below_epsilon_and_top_k_of_one_are_greedy() -> None:
    logits = random_logits(1)
    greedy = int(logits.argmax())
    for params in (SamplingParams(temperature=1e-6), SamplingParams(top_k=1)):
        for seed in range(20):
            assert sample(logits, [SampleInput(params, seed, 0)]) == [(greedy, None)]


def test_logprobs_are_of_the_models_logits_whatever_the_request_changes() -> None:
    logits = random_logits(1)
    params = SamplingParams(temperature=0.1, logit_bias={5: 100.0}, top_k=1, logprobs=1)
    ((token_id, found),) = sample(logits, [SampleInput(params, 1, 1)])
    assert token_id == 5
    assert found is not None
    assert found.logprob == pytest.approx(torch.log_softmax(logits, -1)[0, 5].item(), abs=1e-5)
    assert found.top[0][0] == int(logits.argmax())


def test_the_models_logits_are_not_changed() -> None:
    logits, inputs = random_logits(20), random_inputs(20)
    before = logits.clone()
    sample(logits, inputs)
    assert torch.equal(logits, before)


def test_the_seed_and_the_position_decide_and_nothing_else() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)

    def token(seed: int, position: int) -> int:
        return sample(logits, [SampleInput(SamplingParams(), seed, position)])[0][0]

    assert token(1, 1) == token(1, 1)
    assert len({token(seed, 1) for seed in range(-10, 10)}) > 15
    assert len({token(1, position) for position in range(20)}) > 15


def test_draws_have_the_models_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    inputs = [SampleInput(SamplingParams(), 11, position) for position in range(4000)]
    tokens = [token_id for token_id, _ in sample(logits.expand(4000, 5), inputs)]
    expected = torch.softmax(logits[0], -1) * 4000
    counts = torch.bincount(torch.tensor(tokens), minlength=5)
    assert ((counts - expected) ** 2 / expected).sum().item() < 18.5  # 4 degrees, p = 0.001


def test_a_banned_token_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, 50.0, 0.0]])
    inputs = [SampleInput(SamplingParams(), 0, i, banned_token_ids=(1,)) for i in range(50)]
    tokens = {token_id for token_id, _ in sample(logits.expand(50, 3), inputs)}
    assert tokens == {0, 2}


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(
    ("values", "possible"),
    [
        ((math.nan, 1.0, 2.0, math.nan), {1, 2}),
        ((math.nan,) * 4, {0}),
        ((-math.inf,) * 4, {0}),
        ((0.0, math.inf, math.inf, -math.inf), {1, 2}),
        ((3e38, -3e38, 3e38, math.nan), {0, 2}),
    ],
)
def test_a_broken_row_gives_a_token_and_no_error(
    params: SamplingParams, values: tuple[float, ...], possible: set[int]
) -> None:
    ((token_id, _),) = sample(
        torch.tensor([values]),
        [SampleInput(params, 5, 5, seen_tokens((1,), (2,)), banned_token_ids=(9,))],
    )
    assert token_id in possible


def test_a_broken_row_leaves_the_others_as_they_are() -> None:
    logits, inputs = random_logits(2), random_inputs(2)
    expected = sample(logits, inputs)[1]
    logits[0] = math.nan
    assert sample(logits, inputs)[1] == expected


def test_no_rows_give_nothing() -> None:
    assert sample(torch.zeros(0, 5), []) == []
