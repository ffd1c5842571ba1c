"""Linear layers: cuBLAS as it comes, or a product of our own whose rows do not depend on the batch.

    y = x w^T + bias      x (T, IN), w (OUT, IN), y (T, OUT)

cuBLAS chooses an algorithm by the number of rows, so a row's last bits may change with its batch.
Here each output is summed over i in ascending order, by one tensor core instruction after another
into one sum; tiles may differ between few rows and many, since neither order nor instruction does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_serve.ops.triton.arithmetic import multiply, rounded
from lora_serve.ops.triton.launch import Launch, Machine, kernel
from lora_serve.ops.triton.overlap import wait_for_earlier_kernels

RESERVED_SHARED_BYTES = 1024  # by the driver, of each program's
ROW_BLOCKS_TOGETHER = 8  # neighbouring programs share rows or weights while the L2 cache holds them


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """weight: (out, in), contiguous; bias: (out) or None; both of the model's dtype, on the device.

    The weight itself where it lay so already.
    """

    weight: Tensor
    bias: Tensor | None


def pack_linear(weight: Tensor, bias: Tensor | None, device: torch.device) -> PackedLinear:
    weight = weight.detach().to(device).contiguous()
    if bias is None:
        return PackedLinear(weight, None)
    assert bias.shape == weight.shape[:1], f"bias {tuple(bias.shape)}, weight {tuple(weight.shape)}"
    return PackedLinear(weight, bias.detach().to(device, weight.dtype).contiguous())


@kernel()
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    IN_STEP: tl.constexpr,
    TOGETHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # One program: ROWS rows of OUTS outputs, TOGETHER blocks of rows before the next outputs
    row_blocks = tl.cdiv(num_rows, ROWS)
    out_blocks: tl.constexpr = (OUT + OUTS - 1) // OUTS
    program = tl.program_id(0)
    band = program // (TOGETHER * out_blocks)
    band_height = tl.minimum(row_blocks - band * TOGETHER, TOGETHER)
    within = program % (TOGETHER * out_blocks)
    row = (band * TOGETHER + within % band_height) * ROWS + tl.arange(0, ROWS)
    o = within // band_height * OUTS + tl.arange(0, OUTS)
    x_rows = x_ptr + row.to(tl.int64)[:, None] * IN
    weight_rows = weight_ptr + o.to(tl.int64)[None, :] * IN
    total = tl.zeros((ROWS, OUTS), tl.float32)
    wait_for_earlier_kernels(OVERLAPS)
    for first in range(0, IN, IN_STEP):
        i = first + tl.arange(0, IN_STEP)
        x_mask = (row < num_rows)[:, None]
        weight_mask = (o < OUT)[None, :]
        if IN % IN_STEP != 0:
            x_mask &= (i < IN)[None, :]
            weight_mask &= (i < IN)[:, None]
        x = tl.load(x_rows + i[None, :], mask=x_mask, other=0.0)
        weight = tl.load(weight_rows + i[:, None], mask=weight_mask, other=0.0)
        total = multiply(x, weight, total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + o, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
    to = y_ptr + row.to(tl.int64)[:, None] * OUT + o[None, :]
    y_mask = (row < num_rows)[:, None] & (o < OUT)[None, :]
    tl.store(to, rounded(total, y_ptr.dtype.element_ty), mask=y_mask)


def linear_launch(x: Tensor, packed: PackedLinear, y: Tensor, machine: Machine) -> Launch:
    """The launch that computes y (T, out) from x (T, in), both contiguous."""
    num_rows, in_features = x.shape
    out_features = packed.weight.shape[0]
    assert packed.weight.shape[1] == in_features, (
        f"x has {in_features}, weight {packed.weight.shape}"
    )
    tile = tile_of(x.dtype, num_rows, out_features, machine)
    num_blocks = triton.cdiv(num_rows, tile.rows) * triton.cdiv(out_features, tile.outs)
    return Launch(
        linear_kernel,
        (num_blocks,),
        {
            "x_ptr": x,
            "weight_ptr": packed.weight,
            "bias_ptr": packed.weight if packed.bias is None else packed.bias,
            "y_ptr": y,
            "num_rows": num_rows,
        },
        {
            "IN": in_features,
            "OUT": out_features,
            "ROWS": tile.rows,
            "OUTS": tile.outs,
            "IN_STEP": tile.in_step,
            "TOGETHER": ROW_BLOCKS_TOGETHER,
            "HAS_BIAS": packed.bias is not None,
            "OVERLAPS": machine.overlaps_launches,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's part of a product: rows and outputs, and how far it steps along the inputs."""

    rows: int
    outs: int
    in_step: int
    num_warps: int
    num_stages: int


def tile_of(dtype: torch.dtype, num_rows: int, out_features: int, machine: Machine) -> Tile:
    """Never fewer rows than the widest tensor core instruction takes, used or not.

    Few rows: small tiles, so that every multiprocessor streams weights; where there are few of
    them, each has as much on its way as shared memory holds. Many: as large as registers hold.
    """
    if dtype == torch.float32:
        return Tile(rows=32, outs=64, in_step=32, num_warps=8, num_stages=1)
    if num_rows <= 64 and triton.cdiv(out_features, 64) < 2 * machine.num_multiprocessors:
        in_step = 128 if machine.capability >= 90 else 64  # older cards' registers hold no more
        num_stages = _stages(triton.cdiv(out_features, 32), (64 + 32) * in_step * 2, machine)
        return Tile(rows=64, outs=32, in_step=in_step, num_warps=4, num_stages=num_stages)
    if num_rows <= 64:
        return Tile(rows=64, outs=64, in_step=64, num_warps=4, num_stages=6)
    if 90 <= machine.capability < 120:  # desktop cards since have half the shared memory
        return Tile(rows=128, outs=256, in_step=64, num_warps=8, num_stages=3)
    return Tile(rows=128, outs=128, in_step=64, num_warps=8, num_stages=3)


def _stages(num_programs: int, stage_bytes: int, machine: Machine) -> int:
    """How many stages shared memory holds if all programs run at once, from three to six.

    With six, each has 40 KB on its way, and the next kernel has room to begin.
    """
    programs_each = triton.cdiv(num_programs, machine.num_multiprocessors)
    room = machine.shared_bytes // programs_each - RESERVED_SHARED_BYTES
    return max(3, min(6, room // stage_bytes))
