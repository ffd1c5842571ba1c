"""Mixtures of experts: which experts a row takes, their products by groups of rows, and their sum.

A row's experts are summed in the order in which it chose them, and a product's sums go over i in
ascending order as `linear.py`'s do, so nothing depends on the rows that share an expert. Programs
are laid out by numbers that lie on the device: nothing waits for them, and the grid depends on
shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_serve.ops.contract import ChosenExperts
from lora_serve.ops.triton.arithmetic import multiply, rounded
from lora_serve.ops.triton.launch import Launch, Machine, kernel
from lora_serve.ops.triton.linear import PackedLinear, tile_of
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels

BLOCK = 256  # columns of a row that is summed or added


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """weight: (E, out, in), contiguous, of the model's dtype, on the device. bias: (E, out)."""

    weight: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]


def pack_experts(experts: Sequence[PackedLinear]) -> PackedExperts:
    biases = [expert.bias for expert in experts if expert.bias is not None]
    assert len(biases) in (0, len(experts)), "some experts have a bias"
    weight = torch.stack([expert.weight for expert in experts])
    return PackedExperts(weight, torch.stack(biases) if biases else None)


@kernel()
def choose_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    AMONG_CHOSEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # One program: a row of logits (T, EXPERTS); ids, weights (T, CHOSEN)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_BLOCK)
    place = tl.arange(0, CHOSEN_BLOCK)
    wait_for_earlier_kernels(OVERLAPS)
    logits = tl.load(
        logits_ptr + row * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")
    ).to(tl.float32)
    largest = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - largest), axis=0)
    ids = tl.zeros((CHOSEN_BLOCK,), tl.int32)
    shares = tl.zeros((CHOSEN_BLOCK,), tl.float32)
    for j in tl.static_range(CHOSEN):
        value = tl.max(logits, axis=0)
        # The first of equal ones; of no numbers still one that exists.
        best = tl.min(tl.where(logits == value, expert, EXPERTS - 1), axis=0)
        ids = tl.where(place == j, best, ids)
        shares = tl.where(place == j, tl.exp(value - largest), shares)
        logits = tl.where(expert == best, float("-inf"), logits)
    if AMONG_CHOSEN:
        total = tl.sum(shares, axis=0)
    tl.store(ids_ptr + row * CHOSEN + place, ids, mask=place < CHOSEN)
    tl.store(weights_ptr + row * CHOSEN + place, shares / total, mask=place < CHOSEN)


def choose_launch(
    logits: Tensor, chosen: ChosenExperts, among_chosen: bool, machine: Machine
) -> Launch:
    """logits: (T, E), contiguous."""
    num_rows, num_experts = logits.shape
    num_chosen = chosen.ids.shape[1]
    return Launch(
        choose_kernel,
        (num_rows,),
        {"logits_ptr": logits, "ids_ptr": chosen.ids, "weights_ptr": chosen.weights},
        {
            "EXPERTS": num_experts,
            "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
            "CHOSEN": num_chosen,
            "CHOSEN_BLOCK": triton.next_power_of_2(num_chosen),
            "AMONG_CHOSEN": among_chosen,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=1,
    )


@triton.jit
def block_of_expert(
    first_ptr,
    block_ends_ptr,
    block,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The expert that a block is of, where its ROWS pairs stand in their order, and its last's end.

    Expert e has the blocks up to its end, and pairs first[e] .. first[e + 1]; behind all: EXPERTS.
    """
    experts = tl.arange(0, EXPERTS_BLOCK)
    ends = tl.load(block_ends_ptr + experts, mask=experts < EXPERTS, other=2147483647)
    expert = tl.sum((ends <= block).to(tl.int32), axis=0)
    exists = expert < EXPERTS
    begin = tl.load(first_ptr + expert, mask=exists, other=0)
    end = tl.load(first_ptr + expert + 1, mask=exists, other=0)
    first_block = tl.load(block_ends_ptr + expert, mask=exists, other=0)
    first_block -= tl.cdiv(end - begin, ROWS)
    return expert, begin + (block - first_block) * ROWS + tl.arange(0, ROWS), end


@kernel()
def experts_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    first_ptr,
    block_ends_ptr,
    y_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    IN_STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # y[p] = weight[e] x[p / PAIRS_PER_ROW] + bias[e], pairs p = order[first[e] .. first[e + 1])
    # One program: ROWS pairs of one expert, OUTS outputs
    o = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    wait_for_earlier_kernels(OVERLAPS)
    expert, index, end = block_of_expert(
        first_ptr, block_ends_ptr, tl.program_id(0), EXPERTS, EXPERTS_BLOCK, ROWS
    )
    if expert < EXPERTS:
        pair = tl.load(order_ptr + index, mask=index < end, other=0).to(tl.int64)
        x_rows = x_ptr + (pair // PAIRS_PER_ROW)[:, None] * IN
        weight_rows = weight_ptr + (expert.to(tl.int64) * OUT + o.to(tl.int64))[None, :] * IN
        total = tl.zeros((ROWS, OUTS), tl.float32)
        for first in range(0, IN, IN_STEP):
            i = first + tl.arange(0, IN_STEP)
            x_mask = (index < end)[:, None]
            weight_mask = (o < OUT)[None, :]
            if IN % IN_STEP != 0:
                x_mask &= (i < IN)[None, :]
                weight_mask &= (i < IN)[:, None]
            x = tl.load(x_rows + i[None, :], mask=x_mask, other=0.0)
            weight = tl.load(weight_rows + i[:, None], mask=weight_mask, other=0.0)
            total = multiply(x, weight, total)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * OUT + o, mask=o < OUT, other=0.0)
            total += bias.to(tl.float32)[None, :]
        y_mask = (index < end)[:, None] & (o < OUT)[None, :]
        to = y_ptr + pair[:, None] * OUT + o[None, :]
        tl.store(to, rounded(total, y_ptr.dtype.element_ty), mask=y_mask)


def experts_launch(
    x: Tensor, packed: PackedExperts, chosen: ChosenExperts, y: Tensor, machine: Machine
) -> Launch:
    """x: (T, in) or (T * K, in), y: (T * K, out), both contiguous."""
    num_experts, out_features, in_features = packed.weight.shape
    assert x.shape[1] == in_features, f"x has {x.shape[1]}, weight {packed.weight.shape}"
    num_pairs = chosen.ids.numel()
    tile = tile_of(x.dtype, triton.cdiv(num_pairs, num_experts), out_features, machine)
    order, first, block_ends = blocks_by_expert(chosen.ids.flatten(), num_experts, tile.rows)
    num_blocks = most_blocks(num_pairs, num_experts, tile.rows)
    return Launch(
        experts_kernel,
        (num_blocks, triton.cdiv(out_features, tile.outs)),
        {
            "x_ptr": x,
            "weight_ptr": packed.weight,
            "bias_ptr": packed.weight if packed.bias is None else packed.bias,
            "order_ptr": order,
            "first_ptr": first,
            "block_ends_ptr": block_ends,
            "y_ptr": y,
        },
        {
            "IN": in_features,
            "OUT": out_features,
            "EXPERTS": num_experts,
            "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
            "PAIRS_PER_ROW": num_pairs // len(x),
            "ROWS": tile.rows,
            "OUTS": tile.outs,
            "IN_STEP": tile.in_step,
            "HAS_BIAS": packed.bias is not None,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def most_blocks(num_pairs: int, num_experts: int, rows_per_block: int) -> int:
    """How many blocks there can be, whatever pairs choose."""
    return num_pairs // rows_per_block + min(num_experts, num_pairs)


def blocks_by_expert(
    ids: Tensor, num_experts: int, rows_per_block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs in the order of their experts; where each expert's begin; where its blocks end.

    All int32: (P), (E + 1) and (E).
    """
    ordered, order = ids.sort(stable=True)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device)
    first = torch.searchsorted(ordered, experts, out_int32=True)
    blocks = (first.diff() + (rows_per_block - 1)) // rows_per_block
    return order.to(torch.int32), first, blocks.cumsum(0, dtype=torch.int32)


@kernel()
def combine_kernel(
    x_ptr,
    weights_ptr,
    y_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # y (num_rows, WIDTH) = sum over j of weights[:, j] * x[:, j], with PAIRS_PER_ROW pairs a row
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    wait_for_earlier_kernels(OVERLAPS)
    for j in range(PAIRS_PER_ROW):
        pair = row * PAIRS_PER_ROW + j
        weight = tl.load(weights_ptr + pair, mask=row < num_rows, other=0.0)
        x = tl.load(x_ptr + pair * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(x, weight.broadcast_to(ROWS, BLOCK), total)
    tl.store(y_ptr + row * WIDTH + column, rounded(total, y_ptr.dtype.element_ty), mask=mask)


@kernel()
def add_gated_kernel(
    x_ptr,
    logits_ptr,
    total_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # total (num_rows, WIDTH) += x / (1 + e^-logits)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    wait_for_earlier_kernels(OVERLAPS)
    logits = tl.load(logits_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-logits))
    at = row * WIDTH + column
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(total_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.fma(x, gate.broadcast_to(ROWS, BLOCK), total)
    tl.store(total_ptr + at, rounded(total, total_ptr.dtype.element_ty), mask=mask)


def combine_launch(x: Tensor, chosen: ChosenExperts, y: Tensor, machine: Machine) -> Launch:
    """x: (T * K, H), y: (T, H), both contiguous."""
    arguments = {"x_ptr": x, "weights_ptr": chosen.weights, "y_ptr": y}
    constants = {"PAIRS_PER_ROW": chosen.ids.shape[1]}
    return _of_rows(combine_kernel, y, arguments, constants, machine)


def add_gated_launch(x: Tensor, logits: Tensor, total: Tensor, machine: Machine) -> Launch:
    """x, total: (T, H), logits: (T, 1), all contiguous; total is changed in place."""
    arguments = {"x_ptr": x, "logits_ptr": logits, "total_ptr": total}
    return _of_rows(add_gated_kernel, total, arguments, {}, machine)


def _of_rows(
    function: object,
    y: Tensor,
    arguments: dict[str, Tensor],
    constants: dict[str, int],
    machine: Machine,
) -> Launch:
    """The launch of a kernel whose programs have rows and columns of y (T, H)."""
    num_rows, width = y.shape
    rows = max(1, machine.row_elements // BLOCK)
    return Launch(
        function,
        (triton.cdiv(num_rows, rows), triton.cdiv(width, BLOCK)),
        {**arguments, "num_rows": num_rows},
        {
            "WIDTH": width,
            "BLOCK": BLOCK,
            "ROWS": rows,
            **constants,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=4,
    )
