"""Processed logits of many rows at once against the specification, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lora_serve.sampling.specification.logprobs import float_rows
from lora_serve.sampling.specification.processed import processed
from lora_serve.sampling.torch_device.processed import processed_rows
from tests.fakes.sampling_inputs import inputs_for
from tests.sampling.torch_device.test_output import random_logits

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.mark.parametrize("vocab_size", [1, 2, 37, 513, 3000])
@DEVICES
def test_processed_rows_are_those_of_the_specification(vocab_size: int, device: str) -> None:
    for seed in range(3):
        logits, inputs = random_logits(60, vocab_size, seed), inputs_for(60, vocab_size, seed)
        got = processed_rows(logits.to(device), inputs).cpu()
        for row, item, found in zip(float_rows(logits), inputs, got, strict=True):
            assert found.tolist() == processed(row, item).tolist(), item


@DEVICES
def test_broken_rows_are_processed_as_the_specification_does(device: str) -> None:
    rows = torch.tensor([[x, *[0.5] * 6] for x in (math.nan, math.inf, -math.inf)] * 30)
    rows = torch.cat((rows, torch.full((30, 7), -math.inf)))
    inputs = inputs_for(len(rows), 7, seed=5)
    got = processed_rows(rows.to(device), inputs).cpu()
    with np.errstate(over="ignore"):
        right = [processed(row, item) for row, item in zip(float_rows(rows), inputs, strict=True)]
    assert np.array_equal(got.numpy(), np.stack(right))
