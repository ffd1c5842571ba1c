"""Products with experts' codes: pairs grouped as in experts.py, sums in the order of codes.py.

So a pair gets the bits that the linear layer of its expert would give its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_serve.ops.contract import ChosenExperts
from lora_serve.ops.triton.arithmetic import rounded
from lora_serve.ops.triton.codes import (
    PackedCodes,
    codes_product,
    product_constants,
    tile_of_codes,
)
from lora_serve.ops.triton.experts import block_of_expert, blocks_by_expert, most_blocks
from lora_serve.ops.triton.launch import Launch, Machine, kernel
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels
from lora_serve.ops.triton.quantized_linear import rows_of_groups, weight_arguments


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """all: the weights of all experts, each tensor with the expert as its first dimension."""

    all: PackedCodes
    count: int

    @property
    def out_features(self) -> int:
        return self.all.out_features


def pack_quantized_experts(experts: Sequence[PackedCodes]) -> QuantizedExperts:
    first = experts[0]
    kinds = {(each.bits, each.group, each.in_features, each.out_features) for each in experts}
    assert len(kinds) == 1, f"experts of different codes: {sorted(kinds)}"
    together = replace(
        first,
        codes=torch.stack([each.codes for each in experts]),
        scales=torch.stack([each.scales for each in experts]),
        offsets=_stacked([each.offsets for each in experts]),
        bias=_stacked([each.bias for each in experts]),
    )
    return QuantizedExperts(together, len(experts))


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    assert len(there) in (0, len(tensors)), "some experts have what others have not"
    return torch.stack(there) if there else None


@kernel()
def quantized_experts_kernel(
    x_ptr,
    of_groups_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    order_ptr,
    first_ptr,
    block_ends_ptr,
    y_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_AT_ONCE: tl.constexpr,
    GROUPS_OF_SPAN: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
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
        row = pair // PAIRS_PER_ROW
        numbers = expert.to(tl.int64) * (GROUPS * OUT)
        total = codes_product(
            x_ptr + row * IN,
            of_groups_ptr + row * GROUPS,
            index < end,
            codes_ptr + numbers * (GROUP * BITS // 8),
            scales_ptr + numbers,
            offsets_ptr + numbers,
            o,
            0,
            GROUPS,
            IN,
            OUT,
            BITS,
            GROUP,
            GROUPS_AT_ONCE,
            GROUPS_OF_SPAN,
            PIECE,
            HAS_OFFSETS,
            HAS_ROW_SCALES,
            ROWS,
            OUTS,
        )
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * OUT + o, mask=o < OUT, other=0.0)
            total += bias.to(tl.float32)[:, None]
        to = y_ptr + pair[None, :] * OUT + o[:, None]
        y_mask = (index < end)[None, :] & (o < OUT)[:, None]
        tl.store(to, rounded(total, y_ptr.dtype.element_ty), mask=y_mask)


def quantized_experts_launches(
    x: Tensor, packed: QuantizedExperts, chosen: ChosenExperts, y: Tensor, machine: Machine
) -> list[Launch]:
    """x: (T, in) or (T * K, in), y: (T * K, out), both contiguous."""
    weight, num_experts, num_pairs = packed.all, packed.count, chosen.ids.numel()
    pairs_per_row = num_pairs // len(x)
    x, of_groups, launches = rows_of_groups(x, weight, machine)
    tile = tile_of_codes(x.dtype, triton.cdiv(num_pairs, num_experts), weight, machine)
    order, first, block_ends = blocks_by_expert(chosen.ids.flatten(), num_experts, tile.rows)
    product = Launch(
        quantized_experts_kernel,
        (
            most_blocks(num_pairs, num_experts, tile.rows),
            triton.cdiv(weight.out_features, tile.outs),
        ),
        {
            "x_ptr": x,
            "of_groups_ptr": of_groups,
            **weight_arguments(weight),
            "order_ptr": order,
            "first_ptr": first,
            "block_ends_ptr": block_ends,
            "y_ptr": y,
        },
        {
            **product_constants(weight),
            "HAS_BIAS": weight.bias is not None,
            "EXPERTS": num_experts,
            "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
            "PAIRS_PER_ROW": pairs_per_row,
            "ROWS": tile.rows,
            "OUTS": tile.outs,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return [*launches, product]
