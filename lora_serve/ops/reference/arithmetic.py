"""Sums, exponentials and products whose bits depend on a row's own values alone.

Two foundations. One operation of + − × ÷ √ per element is exact by IEEE 754, whichever vector lane
or thread takes it: `row_sum`, `exponential` and `hyperbolic_tangent` use nothing else. Products are
torch.mm's, which changes a row's bits with the number of rows; so every product has one fixed
shape, and where even that does not make rows independent on this machine, rows are multiplied one
at a time.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

TILE_ROWS = 16
PANEL_COLUMNS = 4096  # a wide weight is multiplied in panels, which also bounds the check below

_LOG2_E = 1.4426950408889634
_LN_2_HIGH = 0.693359375  # few bits, so that n * high is exact
_LN_2_LOW = -2.12194440e-4
# Minimax polynomial of (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2], highest power first (Cephes).
_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# Minimax polynomial of (tanh x - x) / x^3 in x^2 for |x| below 0.625, highest power first (Cephes).
_TANH_COEFFICIENTS = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, by adding its upper half to its lower until one is left.

    Args:
        x: (..., D), float32.

    Returns:
        (...), float32.
    """
    width = x.shape[-1]
    half = (width + 1) // 2
    folded = x[..., :half].clone()
    folded[..., : width - half] += x[..., half:]
    while half > 1:
        width, half = half, (half + 1) // 2
        folded[..., : width - half] += folded[..., half:width]
    return folded[..., 0]


def exponential(x: Tensor) -> Tensor:
    """e^x to 1e-7, for x in [-87, 88]; beyond them the value at the limit.

    Not torch.exp, since that may take other instructions for the last elements of a tensor than
    for the rest. Destroys x, a float32 tensor of any shape.
    """
    x.clamp_(min=-87.0, max=88.0)
    power = torch.mul(x, _LOG2_E).round_()
    x.sub_(power * _LN_2_HIGH).sub_(power * _LN_2_LOW)
    result = x * _EXP_COEFFICIENTS[0]
    for coefficient in _EXP_COEFFICIENTS[1:]:
        result.add_(coefficient).mul_(x)
    result.mul_(x).add_(x).add_(1.0)
    two_to_power = power.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return result.mul_(two_to_power)


def hyperbolic_tangent(x: Tensor) -> Tensor:
    """Tanh x to 3e-7 of its value. x: float32, of any shape.

    Near 0 by a polynomial, for 1 - 2 / (e^2x + 1) would be a difference of nearly equal numbers.
    """
    size = x.abs()
    square = size * size
    near = square * _TANH_COEFFICIENTS[0]
    for coefficient in _TANH_COEFFICIENTS[1:]:
        near.add_(coefficient).mul_(square)
    near.mul_(x).add_(x)
    far = 1.0 - 2.0 / exponential(2.0 * size).add_(1.0)
    return torch.where(size < 0.625, near, far.copysign_(x))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x @ weight.T so that each row of the result is what it would be alone.

    Args:
        x: (M, K), any float dtype.
        weight: (N, K), float32, contiguous, aligned as torch allocates.

    Returns:
        (M, N), float32.
    """
    num_rows = x.shape[0]
    rows = pad_rows(x)
    result = rows.new_empty(rows.shape[0], weight.shape[0])
    multiply_tiles(rows, weight, result)
    return result[:num_rows]


def pad_rows(x: Tensor) -> Tensor:
    """A contiguous float32 copy of x (M, K), with zero rows up to a whole number of tiles."""
    num_rows, width = x.shape
    padded_rows = -(-num_rows // TILE_ROWS) * TILE_ROWS
    padded = torch.empty(padded_rows, width, dtype=torch.float32)
    padded[:num_rows] = x
    padded[num_rows:] = 0.0
    return padded


def multiply_tiles(rows: Tensor, weight: Tensor, result: Tensor) -> None:
    """`product` into `result` (M, N), for rows (M, K) that `pad_rows` has made."""
    for column in range(0, weight.shape[0], PANEL_COLUMNS):
        panel = weight[column : column + PANEL_COLUMNS]
        columns = result[:, column : column + PANEL_COLUMNS]
        if rows_may_share_a_tile(*panel.shape, torch.get_num_threads()):
            transposed = panel.t()
            for tile, into in zip(rows.split(TILE_ROWS), columns.split(TILE_ROWS), strict=True):
                torch.mm(tile, transposed, out=into)
        else:
            multiply_rows(rows, panel, columns)


def multiply_rows(rows: Tensor, weight: Tensor, result: Tensor) -> None:
    """`multiply_tiles` with tiles of one row, each copied so that its address is aligned alike."""
    for row in range(rows.shape[0]):
        result[row] = torch.mm(rows[row : row + 1].clone(), weight.t())[0]


@functools.cache
def rows_may_share_a_tile(out_features: int, in_features: int, num_threads: int) -> bool:
    """Whether torch.mm gives a tile's row the same bits wherever it stands, beside any other rows.

    A fact of this machine and this shape, tried once on random numbers. num_threads is only a key
    of the cache: the library splits its work by it.
    """
    generator = torch.Generator().manual_seed(num_threads)
    weight = torch.randn(out_features, in_features, generator=generator).t()
    rows = torch.randn(TILE_ROWS, in_features, generator=generator)
    together = torch.mm(rows, weight)
    for shift in (1, 6):
        moved = torch.mm(rows.roll(shift, 0), weight)
        if not torch.equal(moved.roll(-shift, 0), together):
            return False
    alone = torch.zeros_like(rows)
    alone[0] = rows[-1]
    return torch.equal(torch.mm(alone, weight)[0], together[-1])
