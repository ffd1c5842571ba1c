"""Weights and selections of many rows at once against `weights.py`, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_serve.sampling.specification import weights as weights_module
from lora_serve.sampling.torch_device.weights import largest, relative_weights, units


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_have_the_bits_of_the_specification(device: str) -> None:
    rows = 30 * torch.randn(5, 2000, generator=torch.Generator().manual_seed(1))
    scales = torch.tensor([[1.0], [1 / 0.7], [0.01], [50.0], [1 / 3]])
    got = relative_weights(rows.to(device), scales.to(device)).cpu()
    for row, (scale,), weights in zip(rows.numpy(), scales.numpy(), got, strict=True):
        expected = weights_module.relative_weights(row, scale)
        assert np.array_equal(weights.numpy(), expected)
        assert np.array_equal(units(weights).numpy(), weights_module.units(expected))


def test_the_largest_come_by_value_and_then_by_id() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0, -2.0, 3.0], [-0.0, 0.0, -1.0, -torch.inf, -0.5]])
    assert largest(rows, 4).tolist() == [[1, 2, 4, 0], [0, 1, 4, 2]]
    assert largest(rows, 9).shape == (2, 5)
