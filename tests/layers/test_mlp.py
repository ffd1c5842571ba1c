"""Gated MLPs: the kernel that has the activation in it serves steps to which no adapter adds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_serve.layers.batch import OutputRows
from lora_serve.layers.linear import Linear
from lora_serve.layers.mlp import GatedMLP
from lora_serve.ops.contract import LoRAPart, Ops
from lora_serve.ops.select import available_ops
from tests.ops.cases import normal

DTYPE = torch.bfloat16
T, H, INNER = 40, 64, 96
BACKENDS = available_ops()


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]


@pytest.fixture
def x() -> Tensor:
    return normal(T, H, dtype=DTYPE)


def run(ops: Ops, x: Tensor, rows: OutputRows) -> tuple[Tensor, Tensor]:
    """What the MLP gives, and what its layers and the activation give one after another."""
    gate_up = Linear(ops, normal(2 * INNER, H, dtype=DTYPE, seed=1) / 8, None, 0)
    down = Linear(ops, normal(H, INNER, dtype=DTYPE, seed=2) / 8, None, 1)
    hidden = ops.rowwise.silu_and_mul(gate_up(x, rows))
    return GatedMLP(ops, gate_up, "silu", down)(x, rows), down(hidden, rows)


def test_rows_without_adapters_have_the_bits_of_the_kernels_one_by_one(ops: Ops, x: Tensor) -> None:
    got, expected = run(ops, x, OutputRows(torch.arange(T), {}, None))
    assert torch.equal(got, expected)


def test_an_adapter_of_some_rows_acts_before_the_activation(ops: Ops, x: Tensor) -> None:
    a, b = normal(4, H, dtype=DTYPE, seed=3), normal(INNER, 4, dtype=DTYPE, seed=4)
    adapter = ops.adapters.pack_adapter([[LoRAPart(a, b, 0.5, INNER)], []])
    plan = ops.adapters.plan_lora([(3, 9, adapter)], T)
    alone, _ = run(ops, x, OutputRows(torch.arange(T), {}, None))
    got, expected = run(ops, x, OutputRows(torch.arange(T), {}, plan))
    assert torch.equal(got, expected)
    changed = (got != alone).any(dim=1)
    assert changed.nonzero().flatten().tolist() == list(range(3, 9))


def test_a_bias_of_some_rows_acts_before_the_activation(ops: Ops, x: Tensor) -> None:
    biases = [(3, 9, {0: torch.ones(2 * INNER)})]
    alone, _ = run(ops, x, OutputRows(torch.arange(T), {}, None))
    got, expected = run(ops, x, OutputRows(torch.arange(T), {}, None, biases))
    assert torch.equal(got, expected)
    changed = (got != alone).any(dim=1)
    assert changed.nonzero().flatten().tolist() == list(range(3, 9))
