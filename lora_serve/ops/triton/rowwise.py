"""Norms, activations, scaled and capped elements: every row by itself, in float32, rounded once.

How a row is summed depends on its width alone. A program takes several where they are narrow, such
as a head's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lora_serve.ops.triton.arithmetic import hyperbolic_tangent, rounded
from lora_serve.ops.triton.launch import Launch, Machine, kernel
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels

MAX_WIDTH = 32768
ACTIVATION_BLOCK = 1024

# What change_kernel makes of each element.
SCALE, CAP, GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@kernel()
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # y = r / sqrt(mean(r^2) + eps) * weight, where r = x, or residual + x written to residual
    # x, residual, y (num_rows, WIDTH); one program per ROWS rows
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    offsets = row.to(tl.int64) * WIDTH + column
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    wait_for_earlier_kernels(OVERLAPS)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total = rounded(x, residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / WIDTH
    scale = 1.0 / tl.sqrt_rn(mean_square + eps)
    y = x * scale[:, None] * weight.to(tl.float32)
    tl.store(y_ptr + offsets, rounded(y, y_ptr.dtype.element_ty), mask)


@kernel()
def layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # y = c / sqrt(mean(c^2) + eps) * weight + bias, where c = x - mean(x)
    # x, y (num_rows, WIDTH); one program per ROWS rows
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    offsets = row.to(tl.int64) * WIDTH + column
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    wait_for_earlier_kernels(OVERLAPS)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / WIDTH
    x = tl.where(mask, x - mean[:, None], 0.0)
    variance = tl.sum(x * x, axis=1) / WIDTH
    scale = 1.0 / tl.sqrt_rn(variance + eps)
    y = x * scale[:, None] * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, rounded(y, y_ptr.dtype.element_ty), mask)


@kernel()
def add_kernel(x_ptr, residual_ptr, size, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    # residual (size) += x
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_earlier_kernels(OVERLAPS)
    x = tl.load(x_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    tl.store(residual_ptr + index, rounded(x, residual_ptr.dtype.element_ty), mask=index < size)


@triton.jit
def activated(gate, IS_GELU: tl.constexpr):
    # silu(g) = g / (1 + e^-g); gelu(g) = g / 2 (1 + tanh u) = g / (1 + e^-2u)
    exponent = -gate
    if IS_GELU:
        # u = sqrt(2 / pi) (g + 0.044715 g^3)
        exponent = -1.5957691216057308 * (gate * tl.fma(gate * gate, 0.044715, 1.0))
    return gate / (1.0 + tl.exp(exponent))


@kernel()
def gate_kernel(
    x_ptr,
    y_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IS_GELU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # y (num_rows, WIDTH) = f(x[:, :WIDTH]) * x[:, WIDTH:], f silu, or gelu with tanh
    # programs (rows, blocks of columns)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    wait_for_earlier_kernels(OVERLAPS)
    gate = tl.load(x_ptr + row * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    y = activated(gate, IS_GELU) * up
    tl.store(y_ptr + row * WIDTH + column, rounded(y, y_ptr.dtype.element_ty), mask=mask)


@kernel()
def change_kernel(
    x_ptr,
    size,
    factor,
    BLOCK: tl.constexpr,
    CHANGE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # x (size) = factor * x for SCALE, factor * tanh(x / factor) for CAP, gelu(x) for GELU
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_earlier_kernels(OVERLAPS)
    x = tl.load(x_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    if CHANGE == GELU:
        x = activated(x, True)
    elif CHANGE == CAP:
        x = hyperbolic_tangent(x / factor) * factor
    else:
        x = x * factor
    tl.store(x_ptr + index, rounded(x, x_ptr.dtype.element_ty), mask=index < size)


def norm_launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    y: Tensor,
    eps: float,
    machine: Machine,
) -> Launch:
    """x, residual, y: (..., D), contiguous. Without a residual, the norm of x itself."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    assert width <= MAX_WIDTH, f"rows of {width} elements; these kernels take {MAX_WIDTH}"
    block = triton.next_power_of_2(width)
    rows = max(1, machine.row_elements // block)
    return Launch(
        norm_kernel,
        (triton.cdiv(num_rows, rows),),
        {
            "x_ptr": x,
            "residual_ptr": x if residual is None else residual,
            "weight_ptr": weight,
            "y_ptr": y,
            "num_rows": num_rows,
            "eps": eps,
        },
        {
            "WIDTH": width,
            "BLOCK": block,
            "ROWS": rows,
            "ADDS": residual is not None,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=min(16, max(2, block // 512)),
    )


def layer_norm_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, eps: float, machine: Machine
) -> Launch:
    """x, y: (T, H), contiguous."""
    num_rows, width = x.shape
    assert width <= MAX_WIDTH, f"rows of {width} elements; these kernels take {MAX_WIDTH}"
    block = triton.next_power_of_2(width)
    rows = max(1, machine.row_elements // block)
    return Launch(
        layer_norm_kernel,
        (triton.cdiv(num_rows, rows),),
        {
            "x_ptr": x,
            "weight_ptr": weight,
            "bias_ptr": weight if bias is None else bias,
            "y_ptr": y,
            "num_rows": num_rows,
            "eps": eps,
        },
        {
            "WIDTH": width,
            "BLOCK": block,
            "ROWS": rows,
            "HAS_BIAS": bias is not None,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=min(16, max(2, block // 512)),
    )


def add_launch(x: Tensor, residual: Tensor, machine: Machine) -> Launch:
    """x, residual: of one shape, contiguous; residual is changed in place."""
    block = machine.row_elements
    return Launch(
        add_kernel,
        (triton.cdiv(x.numel(), block),),
        {"x_ptr": x, "residual_ptr": residual, "size": x.numel()},
        {"BLOCK": block, "OVERLAPS": machine.overlaps_launches},
        num_warps=4,
    )


def gate_launch(x: Tensor, y: Tensor, machine: Machine, *, is_gelu: bool) -> Launch:
    """x: (T, 2 I), y: (T, I), contiguous."""
    num_rows, width = y.shape
    block = min(ACTIVATION_BLOCK, triton.next_power_of_2(width))
    rows = max(1, machine.row_elements // block)
    return Launch(
        gate_kernel,
        (triton.cdiv(num_rows, rows), triton.cdiv(width, block)),
        {"x_ptr": x, "y_ptr": y, "num_rows": num_rows},
        {
            "WIDTH": width,
            "BLOCK": block,
            "ROWS": rows,
            "IS_GELU": is_gelu,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=4,
    )


def change_launch(x: Tensor, change: tl.constexpr, factor: float, machine: Machine) -> Launch:
    """x: contiguous, changed in place. change: SCALE, CAP or GELU, which looks at no factor."""
    block = machine.row_elements
    return Launch(
        change_kernel,
        (triton.cdiv(x.numel(), block),),
        {"x_ptr": x, "size": x.numel(), "factor": factor},
        {"BLOCK": block, "CHANGE": change.value, "OVERLAPS": machine.overlaps_launches},
        num_warps=4,
    )
