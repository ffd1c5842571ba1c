"""Changed logits of many rows against `adjust.py`, row by row and bit for bit."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from lora_serve.sampling.specification.adjust import adjusted
from lora_serve.sampling.torch_device.adjust import adjust
from lora_serve.sampling.torch_device.comparable import comparable_rows
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput
from tests.fakes.sampling_inputs import any_bitmask
from tests.fakes.seen_tokens import counted, seen_tokens

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ODD = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e38)


def bits(rows: Tensor) -> list[int]:
    """Rows as they are compared afterwards, where one NaN is another."""
    return comparable_rows(rows).view(torch.int32).tolist()


def random_item(rng: random.Random, vocab_size: int) -> SampleInput:
    def ids(count: int) -> list[int]:
        return [rng.randrange(-2, vocab_size + 2) for _ in range(rng.randrange(count))]

    params = SamplingParams(
        logit_bias={i: rng.uniform(-9, 9) for i in ids(4)} if rng.random() < 0.3 else {},
        repetition_penalty=rng.choice((1.0, 1.3, 0.7)),
        frequency_penalty=rng.choice((0.0, 0.7, -0.3)),
        presence_penalty=rng.choice((0.0, 0.6)),
    )
    seen = seen_tokens(ids(40), ids(60))
    banned = ids(3) if rng.random() < 0.3 else ()
    bitmask = any_bitmask(vocab_size, rng) if rng.random() < 0.3 else None
    return SampleInput(params, 0, 0, seen, banned, bitmask)


@DEVICES
@pytest.mark.parametrize("vocab_size", [1, 17, 300])
def test_rows_are_changed_as_each_is_alone(vocab_size: int, device: str) -> None:
    rng = random.Random(vocab_size)
    for count in (1, 2, 40):
        generator = torch.Generator().manual_seed(count)
        rows = 5 * torch.randn(count, vocab_size, generator=generator)
        rows[rng.randrange(count), rng.randrange(vocab_size)] = rng.choice(ODD)
        inputs = [random_item(rng, vocab_size) for _ in range(count)]
        expected = [adjusted(row.numpy(), item) for row, item in zip(rows, inputs, strict=True)]
        changed = rows.to(device, copy=True)
        adjust(changed, inputs)
        for row, alone in zip(changed.cpu(), map(torch.from_numpy, expected), strict=True):
            assert bits(row) == bits(alone)


@DEVICES
def test_a_token_that_was_not_counted_yet_counts(device: str) -> None:
    rng, vocab_size = random.Random(3), 30
    for count in (1, 40):
        rows = 5 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(count))
        inputs = [random_item(rng, vocab_size) for _ in range(count)]
        pending = [rng.choice((-1, 0, rng.randrange(vocab_size))) for _ in inputs]
        expected = [
            adjusted(row.numpy(), counted(item, token_id))
            for row, item, token_id in zip(rows, inputs, pending, strict=True)
        ]
        changed = rows.to(device, copy=True)
        adjust(changed, inputs, torch.tensor(pending, device=device))
        for row, alone in zip(changed.cpu(), map(torch.from_numpy, expected), strict=True):
            assert bits(row) == bits(alone)


def test_rows_of_whom_nothing_is_asked_stay_as_they_are() -> None:
    rows = torch.tensor([[1.0, -0.0, math.inf]])
    adjust(rows, [SampleInput(SamplingParams(), 0, 0)])
    assert bits(rows) == bits(torch.tensor([[1.0, -0.0, math.inf]]))
