"""`specification/processed.py` in torch: the same bits, for many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.host_copies import to_device
from lora_serve.sampling.torch_device.adjust import adjust
from lora_serve.sampling.torch_device.comparable import comparable_rows
from lora_serve.sampling.torch_device.weights import largest, relative_weights, units
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput

_Column = Callable[[npt.NDArray[np.generic]], Tensor]  # (M, 1), on the device


def processed_rows(
    logits: Tensor, inputs: Sequence[SampleInput], pending_tokens: Tensor | None = None
) -> Tensor:
    """The logits (M, V) that tokens are drawn from, float32.

    pending_tokens: (M), as `Sampler.sample` has them.
    """
    rows = logits.to(torch.float32, copy=True)
    adjust(rows, inputs, pending_tokens)
    rows = comparable_rows(rows)
    params = [item.params for item in inputs]

    def column(values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(values[:, None]), rows.device)

    scales = column(np.array([1 if p.is_greedy else 1 / p.temperature for p in params], np.float32))
    if not any(_is_filtered(p, rows.shape[1]) for p in params):
        return rows * scales
    return (rows * scales).masked_fill_(~_drawable(rows, scales, params, column), -torch.inf)


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return not params.is_greedy and params.has_filters(vocab_size)


def _drawable(
    rows: Tensor, scales: Tensor, params: Sequence[SamplingParams], column: _Column
) -> Tensor:
    """(M, V): what the filters leave: top_k, min_p and top_p, in this order."""
    size = rows.shape[1]
    peaks = rows.amax(1, keepdim=True)
    weights = relative_weights(torch.where(peaks > -torch.inf, rows, 0.0), scales)
    top_k = np.array([p.top_k if 0 < p.top_k < size else size for p in params])
    is_kept = _largest(rows, top_k, column) if (top_k < size).any() else torch.ones_like(rows) > 0
    is_kept &= weights >= column(np.array([p.min_p for p in params], np.float32))
    kept = torch.where(is_kept, units(weights), 0)
    is_nucleus = _nucleus(weights, kept, column(np.array([p.top_p for p in params], np.float64)))
    is_unfiltered = np.array([not _is_filtered(p, size) for p in params])
    return is_nucleus | column(is_unfiltered)


def _largest(rows: Tensor, top_k: npt.NDArray[np.int64], column: _Column) -> Tensor:
    size = rows.shape[1]
    ids = largest(rows, int(top_k[top_k < size].max()))
    is_top = torch.arange(ids.shape[1], device=rows.device) < column(top_k)
    return torch.zeros_like(rows, dtype=torch.bool).scatter_(1, ids, is_top) | column(top_k == size)


def _nucleus(weights: Tensor, kept: Tensor, top_p: Tensor) -> Tensor:
    """Where the fewest largest of the units are that together hold top_p of their sum.

    top_p of 1 keeps all that weigh anything.
    """
    totals = kept.sum(1, keepdim=True)
    limits = (top_p * totals.to(torch.float64)).to(torch.int64).clamp(min=1)
    order = torch.where(kept > 0, weights, -1.0).argsort(dim=1, descending=True, stable=True)
    in_order = kept.gather(1, order)
    before = in_order.cumsum(1) - in_order
    is_kept = (in_order > 0) & ((before < limits) | (top_p >= 1))
    return torch.zeros_like(is_kept).scatter_(1, order, is_kept)
