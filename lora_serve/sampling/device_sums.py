"""Sums along rows whose bits depend on the row alone, with nothing but element-wise additions.

torch's own sums and scans choose their order by how many rows there are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_CHUNK = 512


def row_sums(values: Tensor) -> Tensor:
    """(..., W) -> (..., 1): the upper half is added to the lower until one is left."""
    while (width := values.shape[-1]) > 1:
        half = (width + 1) // 2
        lower, upper = values[..., :half], pad(values[..., half:], (0, 2 * half - width))
        values = lower + upper
    return values


def running_sums(values: Tensor) -> Tensor:
    """(..., W) -> (..., W), by log2(W) additions of a shifted copy (Hillis and Steele 1986)."""
    step = 1
    while step < values.shape[-1]:
        values = values + pad(values[..., :-step], (step, 0))
        step *= 2
    return values


def first_passing(weights: Tensor, share: Tensor, reaching: bool = False) -> Tensor:
    """Where each row's running sum first exceeds `share` of its whole sum; never a weight of 0.

    Sums chunks first and walks one chunk only, so that the row is read about twice.

    Args:
        weights: (M, W), float64, none negative, one positive in each row.
        share: (M, 1), float64, in [0, 1).
        reaching: where the running sum first is at least so much, instead of above it.

    Returns:
        (M), int64; the last positive weight where rounding hides the right one.
    """
    num_rows, width = weights.shape
    chunks = pad(weights, (0, -width % _CHUNK)).view(num_rows, -1, _CHUNK)
    sums = row_sums(chunks)[..., 0]
    cdf = running_sums(sums)
    target = share * cdf[:, -1:]
    chunk = _first(cdf, sums, target, reaching)[:, None]
    before = pad(cdf, (1, 0)).gather(1, chunk)
    inside = chunks.gather(1, chunk[..., None].expand(-1, 1, _CHUNK))[:, 0]
    return chunk[:, 0] * _CHUNK + _first(running_sums(inside), inside, target - before, reaching)


def _first(cdf: Tensor, weights: Tensor, target: Tensor, reaching: bool) -> Tensor:
    """(M): the first column that passes and adds something, or the last that adds something."""
    adds = weights > 0
    passes = adds & (cdf >= target if reaching else cdf > target)
    last = weights.shape[1] - 1 - adds.flip(1).to(torch.int8).argmax(1)
    return torch.where(passes.any(1), passes.to(torch.int8).argmax(1), last)
