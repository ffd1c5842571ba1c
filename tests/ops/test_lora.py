from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lora_serve.ops.contract import LoRAPart, Ops
from tests.ops.cases import assert_close, exact_lora, normal, whole_numbers

IN, Q, KV = 48, 64, 32  # a fused q k v layer
OUT = Q + 2 * KV


def q_and_v(dtype: torch.dtype, rank: int, seed: int) -> list[LoRAPart]:
    """An adapter of q and v that leaves k alone."""
    return [
        LoRAPart(
            normal(rank, IN, dtype=dtype, seed=seed),
            normal(size, rank, dtype=dtype, seed=seed + 1),
            0.5 + seed / 64,
            start,
        )
        for size, start in ((Q, 0), (KV, Q + KV))
    ]


def apply(
    ops: Ops,
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[tuple[int, int, Sequence[LoRAPart]]],
) -> torch.Tensor:
    """Linear layer 1 of three; the others have no parts."""
    packed = [
        (start, end, ops.adapters.pack_adapter([[], parts, []])) for start, end, parts in segments
    ]
    y = y.clone()
    ops.adapters.lora(y, x, ops.adapters.plan_lora(packed, len(x)), 1)
    return y


@pytest.mark.parametrize("ranks", [(8, 16, 4), (1, 64, 13)])
def test_each_segment_gets_its_own_delta(
    ops: Ops, dtype: torch.dtype, ranks: tuple[int, ...]
) -> None:
    x, y = normal(30, IN, dtype=dtype), normal(30, OUT, dtype=dtype, seed=1)
    adapters = [q_and_v(dtype, rank, seed=10 * rank) for rank in ranks]
    segments = [(2, 3, adapters[0]), (3, 20, adapters[1]), (25, 30, adapters[2])]
    expected = y.double()
    for start, end, parts in segments:
        expected[start:end] += exact_lora(x[start:end], parts, OUT)
    assert_close(apply(ops, y, x, segments), expected, dtype)


def test_rows_and_columns_without_an_adapter_keep_their_bits(ops: Ops, dtype: torch.dtype) -> None:
    x, y = normal(10, IN, dtype=dtype), normal(10, OUT, dtype=dtype, seed=1)
    got = apply(ops, y, x, [(3, 5, q_and_v(dtype, 8, seed=0))])
    assert torch.equal(got[:3], y[:3])
    assert torch.equal(got[5:], y[5:])
    assert torch.equal(got[:, Q : Q + KV], y[:, Q : Q + KV])
    assert not torch.equal(got[3:5], y[3:5])


def test_a_linear_layer_without_parts_is_left_alone(ops: Ops, dtype: torch.dtype) -> None:
    x, y = normal(4, IN, dtype=dtype), normal(4, OUT, dtype=dtype, seed=1)
    plan = ops.adapters.plan_lora(
        [(0, 4, ops.adapters.pack_adapter([[], q_and_v(dtype, 8, 0), []]))], 4
    )
    untouched = y.clone()
    ops.adapters.lora(untouched, x, plan, 0)
    ops.adapters.lora(untouched, x, plan, 2)
    assert torch.equal(untouched, y)


@pytest.mark.parametrize("rank", [1, 5, 16, 40])
def test_a_rows_delta_does_not_depend_on_its_batch(ops: Ops, dtype: torch.dtype, rank: int) -> None:
    x, y = normal(50, IN, dtype=dtype), normal(50, OUT, dtype=dtype, seed=1)
    mine, other = q_and_v(dtype, rank, seed=3), q_and_v(dtype, 24, seed=7)
    alone = torch.cat(
        [apply(ops, y[i : i + 1], x[i : i + 1], [(0, 1, mine)]) for i in range(len(x))]
    )
    assert torch.equal(apply(ops, y, x, [(0, 50, mine)]), alone)
    mixed = apply(ops, y, x, [(0, 7, other), (7, 8, mine), (8, 20, other), (20, 50, mine)])
    assert torch.equal(mixed[7:8], alone[7:8])
    assert torch.equal(mixed[20:], alone[20:])


def test_the_hidden_stays_float32_and_the_sum_is_rounded_once(ops: Ops, dtype: torch.dtype) -> None:
    x = whole_numbers(9, IN, dtype=dtype, most=4, seed=1)
    y = whole_numbers(9, OUT, dtype=dtype, most=200, seed=2)
    a = whole_numbers(8, IN, dtype=dtype, most=4, seed=3)
    b = whole_numbers(OUT, 8, dtype=dtype, most=1, seed=4)
    part = LoRAPart(a, b, 0.25, 0)
    expected = (y.double() + exact_lora(x, [part], OUT)).to(dtype)
    assert torch.equal(apply(ops, y, x, [(0, 9, [part])]), expected)
