"""What rows have for each group of a weight's codes: the sum of their x there, or codes of 8 bits.

One row's are its own, found in a way that knows no other row. T rows of IN inputs, groups of GROUP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_serve.ops.triton.launch import Launch, Machine, kernel
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels

LARGEST_BITS = tl.constexpr(0x7F800000)  # of infinity; what is not a number has larger ones
TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, ties go to even
LEAST_MAGNITUDE = tl.constexpr(2.0**-100)


@kernel()
def group_sums_kernel(
    x_ptr,
    sums_ptr,
    num_rows,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # sums (T, GROUPS), float32; one program: WIDTH groups, of whichever rows
    index = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    row, group = index // GROUPS, index % GROUPS
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (row < num_rows)[:, None] & (k < IN)
    wait_for_earlier_kernels(OVERLAPS)
    x = tl.load(x_ptr + row[:, None] * IN + k, mask=mask, other=0.0).to(tl.float32)
    tl.store(sums_ptr + index, tl.sum(x, axis=1), mask=row < num_rows)


@kernel()
def quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # codes (T, IN) and scales (T, GROUPS), as ops/quantization.py has them of activations
    index = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    row, group = index // GROUPS, index % GROUPS
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (row < num_rows)[:, None] & (k < IN)
    at = row[:, None] * IN + k
    wait_for_earlier_kernels(OVERLAPS)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    largest_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    largest = largest_bits.to(tl.float32, bitcast=True)
    is_usable = (largest_bits < LARGEST_BITS) & (largest >= LEAST_MAGNITUDE)
    factor = tl.div_rn(127.0, tl.where(is_usable, largest, 1.0))
    codes = x * factor[:, None] + TO_WHOLE - TO_WHOLE
    codes = tl.where(is_usable[:, None], codes, 0.0)
    scale = tl.div_rn(largest, 127.0)
    scale = tl.where(largest_bits < LARGEST_BITS, scale, float("nan"))
    tl.store(codes_ptr + at, codes.to(codes_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + index, scale, mask=row < num_rows)


def group_sums_launch(x: Tensor, sums: Tensor, group: int, machine: Machine) -> Launch:
    """x: (T, in), contiguous; sums: (T, groups), float32."""
    return _launch(group_sums_kernel, {"x_ptr": x, "sums_ptr": sums}, sums, x, group, machine)


def quantize_rows_launch(
    x: Tensor, codes: Tensor, scales: Tensor, group: int, machine: Machine
) -> Launch:
    """x, codes: (T, in), contiguous, codes bfloat16; scales: (T, groups), float32."""
    assert codes.dtype == torch.bfloat16, f"codes in {codes.dtype}"
    arguments = {"x_ptr": x, "codes_ptr": codes, "scales_ptr": scales}
    return _launch(quantize_rows_kernel, arguments, scales, x, group, machine)


def _launch(
    function: object,
    arguments: dict[str, Tensor],
    of_groups: Tensor,
    x: Tensor,
    group: int,
    machine: Machine,
) -> Launch:
    num_rows, num_groups = of_groups.shape
    width = max(1, machine.row_elements // group)
    return Launch(
        function,
        (triton.cdiv(num_rows * num_groups, width),),
        {**arguments, "num_rows": num_rows},
        {
            "IN": x.shape[1],
            "GROUP": group,
            "GROUPS": num_groups,
            "WIDTH": width,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=4,
    )
