"""Logprobs of many rows at once against the specification, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lora_serve.sampling.specification.logprobs import token_logprobs
from lora_serve.sampling.torch_device.output import begin_output, token_logprobs_on_device

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
VOCABULARIES = pytest.mark.parametrize("vocab_size", [1, 2, 37, 513, 3000])


def random_logits(count: int, vocab_size: int, seed: int) -> Tensor:
    """Logits of a bfloat16 model: with ties."""
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(count, vocab_size, generator=generator)).bfloat16().float()


@VOCABULARIES
@DEVICES
def test_logprobs_of_given_tokens_are_those_of_the_specification(
    vocab_size: int, device: str
) -> None:
    logits = random_logits(70, vocab_size, seed=7)
    tokens = [i % vocab_size for i in range(70)]
    got = token_logprobs_on_device(logits.to(device), tokens, 5)
    assert got == token_logprobs(logits, tokens, 5)


@DEVICES
@pytest.mark.parametrize("num_tops", [[None] * 4, [0, 3, 20, 1], [None, 2, None, 0]])
def test_drawn_tokens_come_with_the_logprobs_asked_for(
    num_tops: list[int | None], device: str
) -> None:
    logits, tokens = random_logits(4, 100, seed=3), [5, 0, 99, 7]
    output = begin_output(logits.to(device), torch.tensor(tokens, device=device), num_tops)
    assert output.token_ids.tolist() == tokens
    assert output.wait() == [
        (token, None if num_top is None else token_logprobs(row, [token], num_top)[0])
        for row, token, num_top in zip(logits.split(1), tokens, num_tops, strict=True)
    ]


@DEVICES
def test_broken_rows_have_the_logprobs_of_the_specification(device: str) -> None:
    bad = (math.nan, math.inf, -math.inf)
    rows = torch.tensor([[x] * 7 for x in bad] + [[x, *[0.5] * 6] for x in bad])
    tokens = [0, 0, 0, 1, 0, 1]
    assert token_logprobs_on_device(rows.to(device), tokens, 2) == token_logprobs(rows, tokens, 2)
