"""The batched sampler against the one it is specified by, row by row."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from lora_serve.sampling import weights as weights_module
from lora_serve.sampling.device_sampler import (
    begin_sampling,
    sample_on_device,
    token_logprobs_on_device,
)
from lora_serve.sampling.device_weights import largest, relative_weights, share_of, units
from lora_serve.sampling.logprobs import token_logprobs
from lora_serve.sampling.sampler import sample
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput
from tests.fakes.seen_tokens import counted, seen_tokens

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
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
VOCABULARIES = pytest.mark.parametrize("vocab_size", [1, 2, 37, 513, 3000])


def random_inputs(count: int, vocab_size: int, seed: int) -> list[SampleInput]:
    rng = random.Random(seed)
    inputs = []
    for index in range(count):
        params = replace(PARAMS[index % len(PARAMS)], logprobs=rng.choice((None, 0, 3, 20)))
        tokens = [rng.randrange(-1, vocab_size + 2) for _ in range(30)]
        banned = tokens[:2] if rng.random() < 0.3 else ()
        inputs.append(
            SampleInput(
                params,
                rng.randrange(2**63),
                9,
                seen_tokens(tokens[:20], tokens[10:]),
                banned,
            )
        )
    return inputs


def random_logits(count: int, vocab_size: int, seed: int) -> Tensor:
    """Of a bfloat16 model: with ties."""
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(count, vocab_size, generator=generator)).bfloat16().float()


@VOCABULARIES
@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_and_logprobs_are_those_of_the_specification(
    vocab_size: int, dtype: torch.dtype, device: str
) -> None:
    inputs = random_inputs(40, vocab_size, seed=1)
    logits = random_logits(40, vocab_size, seed=2).to(dtype)
    there = logits.to(device, copy=True)
    assert sample_on_device(there, inputs) == sample(logits, inputs)
    assert torch.equal(there.cpu(), logits)


@DEVICES
def test_tokens_that_were_not_counted_yet_count(device: str) -> None:
    """More rows than are changed at once, and some that change nothing."""
    logits = random_logits(300, 37, seed=9)
    uncounted = [-1 if row % 3 else token for row, token in enumerate(logits.argmax(1).tolist())]
    choices = (PARAMS[0], SamplingParams(temperature=0.0, repetition_penalty=4.0))
    inputs = [SampleInput(choices[row // 2 % 2], seed=0, position=9) for row in range(300)]
    expected = sample(logits, list(map(counted, inputs, uncounted)))
    on_device = torch.tensor(uncounted, device=device)
    assert begin_sampling(logits.to(device), inputs, on_device).tell() == expected
    assert expected != sample(logits, inputs)


@VOCABULARIES
@DEVICES
def test_logprobs_of_given_tokens_are_those_of_the_specification(
    vocab_size: int, device: str
) -> None:
    logits = random_logits(70, vocab_size, seed=7)
    tokens = [i % vocab_size for i in range(70)]
    got = token_logprobs_on_device(logits.to(device), tokens, 5)
    assert got == token_logprobs(logits, tokens, 5)


def test_a_row_gives_the_same_bits_alone_and_in_company() -> None:
    inputs = random_inputs(30, 1000, seed=5)
    logits = random_logits(30, 1000, seed=6)
    together = sample_on_device(logits, inputs)
    for index, result in enumerate(together):
        assert sample_on_device(logits[index : index + 1], inputs[index : index + 1]) == [result]


@DEVICES
def test_what_a_broken_model_gives_never_stops_the_step(device: str) -> None:
    bad, fine = (math.nan, math.inf, -math.inf), [0.5] * 7
    rows = torch.tensor([[x] * 7 for x in bad] + [[x, *fine[1:]] for x in bad] + [fine])
    for params in PARAMS:
        inputs = [SampleInput(replace(params, logprobs=2), seed=4, position=3)] * len(rows)
        got = sample_on_device(rows.to(device), inputs)
        assert got == sample(rows, inputs)


def test_the_largest_come_by_value_and_then_by_id() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0, -2.0, 3.0], [-0.0, 0.0, -1.0, -torch.inf, -0.5]])
    assert largest(rows, 4).tolist() == [[1, 2, 4, 0], [0, 1, 4, 2]]
    assert largest(rows, 9).shape == (2, 5)


# ── weights ─────────────────────────────────────────────────────────────────────────────────────


@DEVICES
def test_weights_have_the_bits_of_the_specification(device: str) -> None:
    rows = 30 * torch.randn(5, 2000, generator=torch.Generator().manual_seed(1))
    scales = torch.tensor([[1.0], [1 / 0.7], [0.01], [50.0], [1 / 3]])
    got = relative_weights(rows.to(device), scales.to(device)).cpu()
    for row, (scale,), weights in zip(rows.numpy(), scales.numpy(), got, strict=True):
        expected = weights_module.relative_weights(row, scale)
        assert np.array_equal(weights.numpy(), expected)
        assert np.array_equal(units(weights).numpy(), weights_module.units(expected))


def test_shares_are_exact_in_64_bits() -> None:
    rng = random.Random(8)
    totals = [rng.randrange(2**62) for _ in range(500)] + [0, 1, 2**62 - 1, 2**31, 2**31 - 1]
    randoms = [rng.randrange(2**53) for _ in range(500)] + [2**53 - 1, 0, 2**53 - 1, 1, 2**27]
    got = share_of(torch.tensor(totals), torch.tensor(randoms)).tolist()
    assert got == [total * part >> 53 for total, part in zip(totals, randoms, strict=True)]
