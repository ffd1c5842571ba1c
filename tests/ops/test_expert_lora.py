"""Deltas of experts, planned by the host and, where there are kernels for it, by the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lora_serve.layers.expert_lora import ExpertDeltas
from lora_serve.ops.contract import ChosenExperts, LoRAPart, Ops, PackedAdapter
from tests.ops.cases import assert_close, normal

IN, OUT, NUM_EXPERTS, NUM_CHOSEN = 40, 24, 5, 2
DTYPE = torch.bfloat16


def part(seed: int, rank: int) -> LoRAPart:
    return LoRAPart(
        normal(rank, IN, dtype=DTYPE, seed=seed), normal(OUT, rank, dtype=DTYPE, seed=-seed), 0.5, 0
    )


PARTS = {
    rank: [part(100 * rank + expert, rank) for expert in range(NUM_EXPERTS)] for rank in (4, 19)
}


def packed(ops: Ops, rank: int) -> list[PackedAdapter]:
    """An adapter of each expert, which changes the second of its linear layers."""
    return [ops.adapters.pack_adapter([[], [each]]) for each in PARTS[rank]]


def choices(rows: int) -> ChosenExperts:
    """Most rows take expert 3, and none takes expert 1."""
    ids = torch.tensor([[3, 0], [3, 4], [2, 3]], dtype=torch.int32).repeat(rows, 1)[:rows]
    return ChosenExperts(ids.contiguous(), torch.ones(rows, NUM_CHOSEN))


def added(
    ops: Ops, chosen: ChosenExperts, x: Tensor, changes: list[tuple[int, int, int]]
) -> Tensor:
    """The deltas of (start, end, rank) rows, added to nothing; to each pair one."""
    y = torch.zeros(len(chosen.ids) * NUM_CHOSEN, OUT, dtype=DTYPE)
    of_ranks = [(start, end, packed(ops, rank)) for start, end, rank in changes]
    deltas = ExpertDeltas(ops, of_ranks, chosen)
    deltas.add(y, x, 0)
    assert not y.any(), "the first layer has no delta"
    deltas.add(y, x, 1)
    return y


CHANGES = pytest.mark.parametrize(
    "changes", [[(0, 50, 4)], [(2, 5, 19), (5, 44, 4)], [(49, 50, 19)]], ids=str
)


@CHANGES
def test_each_pair_gets_the_delta_of_its_adapters_expert(
    ops: Ops, changes: list[tuple[int, int, int]]
) -> None:
    x, chosen = normal(50, IN, dtype=DTYPE), choices(50)
    got = added(ops, chosen, x, changes)
    exact = torch.zeros(50, NUM_CHOSEN, OUT, dtype=torch.float64)
    for start, end, rank in changes:
        for row in range(start, end):
            for j, expert in enumerate(chosen.ids[row].tolist()):
                one = PARTS[rank][expert]
                exact[row, j] = (
                    one.scale * (x[row].double() @ one.a.double().t()) @ one.b.double().t()
                )
    assert_close(got, exact.flatten(0, 1), DTYPE)


@CHANGES
def test_a_plan_of_the_device_gives_the_bits_of_the_hosts_and_of_a_row_alone(
    ops: Ops, changes: list[tuple[int, int, int]]
) -> None:
    x, chosen = normal(50, IN, dtype=DTYPE), choices(50)
    got = added(ops, chosen, x, changes)
    if ops.device.type == "cpu":  # the host's plan is of tensors of a card, where there is one
        assert torch.equal(added(replace(ops, plan_pairs=None), chosen, x, changes), got)
    each = x.repeat_interleave(NUM_CHOSEN, 0)  # a row for each pair gives the same bits
    assert torch.equal(added(ops, chosen, each, changes), got)
    start, _, rank = changes[-1]
    alone = ChosenExperts(chosen.ids[start : start + 1], chosen.weights[start : start + 1])
    pairs = slice(NUM_CHOSEN * start, NUM_CHOSEN * (start + 1))
    assert torch.equal(added(ops, alone, x[start : start + 1].clone(), [(0, 1, rank)]), got[pairs])


def test_a_plan_has_the_same_shape_whatever_rows_choose(ops: Ops) -> None:
    """So nothing of a step waits for what its tokens chose."""
    if ops.plan_pairs is None:
        pytest.skip(f"the host plans for {ops.name}")
    experts = packed(ops, 4)
    shapes = set()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, NUM_EXPERTS, (40, NUM_CHOSEN), generator=generator)
        chosen = ChosenExperts(ids.int(), torch.ones(40, NUM_CHOSEN))
        pairs, plan = ops.plan_pairs([(3, 30, experts)], chosen)
        shapes.add((pairs.shape, plan.words.shape, plan.num_tiles))
    assert len(shapes) == 1
