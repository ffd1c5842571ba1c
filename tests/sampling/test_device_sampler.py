"""The batched sampler against the one it is specified by, row by row."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from lora_serve.sampling.device_sampler import largest, sample_on_device
from lora_serve.sampling.device_sums import first_passing, row_sums, running_sums
from lora_serve.sampling.sampler import sample
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput, TokenLogprobs

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.5, min_p=0.02),
    SamplingParams(temperature=2.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=10**6),
    SamplingParams(temperature=0.0, logit_bias={3: 50.0, 9: -4.0, 10**6: 1.0}),
    SamplingParams(temperature=1.0, repetition_penalty=1.7),
    SamplingParams(temperature=0.9, frequency_penalty=0.8, presence_penalty=-0.5, top_p=0.95),
)
VOCABULARIES = pytest.mark.parametrize("vocab_size", [1, 2, 37, 513, 3000])


def random_inputs(count: int, vocab_size: int, seed: int) -> list[SampleInput]:
    rng = random.Random(seed)
    inputs = []
    for index in range(count):
        params = replace(PARAMS[index % len(PARAMS)], logprobs=rng.choice((None, 0, 3, 20)))
        tokens = [rng.randrange(-1, vocab_size + 2) for _ in range(30)]
        banned = tokens[:2] if rng.random() < 0.3 else ()
        inputs.append(
            SampleInput(params, rng.randrange(2**63), 9, tokens[:20], tokens[20:], banned)
        )
    return inputs


def random_logits(count: int, vocab_size: int, seed: int) -> Tensor:
    """Of a bfloat16 model: with ties."""
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(count, vocab_size, generator=generator)).bfloat16().float()


@VOCABULARIES
def test_tokens_are_those_of_the_specification(vocab_size: int) -> None:
    inputs = random_inputs(60, vocab_size, seed=1)
    logits = random_logits(60, vocab_size, seed=2)
    before = logits.clone()
    got, expected = sample_on_device(logits, inputs), sample(logits, inputs)
    assert [token for token, _ in got] == [token for token, _ in expected]
    assert torch.equal(logits, before)


@VOCABULARIES
def test_logprobs_are_those_of_the_specification_up_to_rounding(vocab_size: int) -> None:
    inputs = random_inputs(40, vocab_size, seed=3)
    logits = random_logits(40, vocab_size, seed=4)
    for (_, got), (_, expected) in zip(
        sample_on_device(logits, inputs), sample(logits, inputs), strict=True
    ):
        if expected is None:
            assert got is None
            continue
        assert got is not None
        assert (got.token_id, got.rank) == (expected.token_id, expected.rank)
        assert [i for i, _ in got.top] == [i for i, _ in expected.top]
        assert flat(got) == pytest.approx(flat(expected), abs=1e-6)


def flat(logprobs: TokenLogprobs) -> list[float]:
    return [logprobs.logprob, *(value for _, value in logprobs.top)]


def test_a_row_gives_the_same_bits_alone_and_in_company() -> None:
    inputs = random_inputs(30, 1000, seed=5)
    logits = random_logits(30, 1000, seed=6)
    together = sample_on_device(logits, inputs)
    for index, result in enumerate(together):
        assert sample_on_device(logits[index : index + 1], inputs[index : index + 1]) == [result]


def test_what_a_broken_model_gives_never_stops_the_step() -> None:
    bad, fine = (math.nan, math.inf, -math.inf), [0.5] * 7
    rows = torch.tensor([[x] * 7 for x in bad] + [[x, *fine[1:]] for x in bad] + [fine])
    for params in PARAMS:
        inputs = [SampleInput(replace(params, logprobs=2), seed=4, position=3)] * len(rows)
        got = sample_on_device(rows, inputs)
        assert [token for token, _ in got] == [token for token, _ in sample(rows, inputs)]
        assert not any(math.isnan(value) for _, lp in got if lp is not None for value in flat(lp))


def test_the_largest_come_by_value_and_then_by_id() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0, -2.0, 3.0], [-0.0, 0.0, -1.0, -torch.inf, -0.5]])
    assert largest(rows, 4).tolist() == [[1, 2, 4, 0], [0, 1, 4, 2]]
    assert largest(rows, 9).shape == (2, 5)


# ── sums ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [1, 2, 7, 512, 513, 2000])
def test_sums_are_sums(width: int) -> None:
    values = torch.rand(3, width, dtype=torch.float64)
    torch.testing.assert_close(row_sums(values), values.sum(1, keepdim=True))
    torch.testing.assert_close(running_sums(values), values.cumsum(1))


@pytest.mark.parametrize("width", [1, 5, 600, 2000])
def test_the_passing_index_is_that_of_a_plain_walk(width: int) -> None:
    rng = random.Random(width)
    weights = torch.tensor(
        [[rng.choice((0.0, 1.0, 2.0, 3.0)) for _ in range(width - 1)] + [1.0] for _ in range(50)],
        dtype=torch.float64,
    )
    shares = torch.tensor([[rng.randrange(64) / 64] for _ in range(50)], dtype=torch.float64)
    for reaching in (False, True):
        found = first_passing(weights, shares, reaching).tolist()
        for row, (share,), index in zip(weights.tolist(), shares.tolist(), found, strict=True):
            target = share * sum(row)
            sums = list(accumulate(row))
            assert index == next(
                i
                for i, (weight, total) in enumerate(zip(row, sums, strict=True))
                if weight and (total >= target if reaching else total > target)
            )


def test_a_weight_of_zero_is_never_chosen() -> None:
    weights = torch.zeros(1, 1500, dtype=torch.float64)
    weights[0, 700] = 1e-300
    for share in (0.0, 0.5, 1.0 - 2**-53):
        for reaching in (False, True):
            target = torch.tensor([[share]], dtype=torch.float64)
            assert first_passing(weights, target, reaching).item() == 700
