"""One token from one row of logits and one uniform number: filters, then the inverse CDF.

The order is vLLM's: temperature, min_p, top_k, top_p. What a filter drops gets weight 0 by a
product, because picking by a mask takes ten times longer where it is hard to predict. Sums are
float64 in an order fixed by the row alone, so row and number give the same token in any batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lora_serve.sampling.top import FloatRow, top_ids
from lora_serve.sampling_params import SamplingParams

_CHUNK = 512
_SLICE = 16384  # all 151,936 at once takes four times as long (page faults)
_NUM_BINS = 0x3F81  # upper halves of the floats from 0 to 1


def draw_token(row: FloatRow, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` of the distribution's CDF.

    min_p and top_k commute, because min_p compares with the likeliest token, which top_k keeps.
    top_k keeps exactly k tokens, so top_k=1 is greedy.

    Args:
        row: (V), comparable, with at least one entry above -inf; not changed.
        params: not greedy. uniform: in [0, 1).
    """
    ids = None
    if 0 < params.top_k < len(row):
        ids = top_ids(row, params.top_k)
        row = row[ids]
    weights = _weights(row, params.temperature)
    if params.min_p > 0:
        weights *= weights >= np.float32(params.min_p)
    if params.top_p < 1:
        weights = _nucleus(weights, params.top_p)
    index = _index_at(weights, uniform)
    return index if ids is None else int(ids[index])


def _weights(row: FloatRow, temperature: float) -> FloatRow:
    """Probabilities up to a factor: the likeliest token has weight 1, whatever the scale."""
    scaled = row - row.max()
    scaled /= np.float32(temperature)
    return np.exp(scaled, out=scaled)


def _nucleus(weights: FloatRow, top_p: float) -> FloatRow:
    """The weights, with 0 for all but the fewest largest that together hold top_p of the sum.

    The upper half of a float that is not negative orders like the float, so a histogram over it
    tells near which value the nucleus ends; only the weights there have to be sorted.
    """
    bins = weights.view(np.uint32) >> 16
    held = _sums_by_bin(bins, weights)[::-1].cumsum()  # by a bin and those above it
    limit = top_p * held[-1]
    num_above = int(np.searchsorted(held, limit, side="left"))
    last_bin = len(held) - 1 - num_above
    edge = np.flatnonzero(bins == last_bin)
    edge = edge[np.argsort(-weights[edge], kind="stable")]
    rest = limit - (held[num_above - 1] if num_above else 0.0)
    num_kept = 1 + int(np.searchsorted(weights[edge].cumsum(dtype=np.float64), rest, side="left"))
    kept = weights * (bins >= last_bin)
    kept[edge[num_kept:]] = 0
    return kept


def _sums_by_bin(bins: NDArray[np.integer], weights: FloatRow) -> NDArray[np.float64]:
    """Sum of the weights in each bin. By slices, so that temporaries stay in the heap and cache."""
    sums = np.zeros(_NUM_BINS, np.float64)
    for start in range(0, len(weights), _SLICE):
        part = slice(start, start + _SLICE)
        sums += np.bincount(
            bins[part].astype(np.intp), weights[part].astype(np.float64), minlength=_NUM_BINS
        )
    return sums


def _index_at(weights: FloatRow, uniform: float) -> int:
    """Where the CDF of the weights passes `uniform`; never an index of weight 0.

    Sums chunks first and walks one chunk only: a running sum over 151,936 takes ten times longer.
    """
    num_chunks = -(-len(weights) // _CHUNK)
    padded = np.zeros(num_chunks * _CHUNK, np.float64)
    padded[: len(weights)] = weights
    chunks = padded.reshape(num_chunks, _CHUNK)
    cdf = chunks.sum(axis=1).cumsum()
    target = uniform * cdf[-1]
    chunk = _first_above(cdf, target)
    rest = target - (cdf[chunk - 1] if chunk else 0.0)
    return chunk * _CHUNK + _first_above(chunks[chunk].cumsum(), rest)


def _first_above(cdf: NDArray[np.float64], target: float) -> int:
    """First index whose running sum is above the target; the last that adds, if rounding hides it.

    The searches pass over entries of weight 0, because those do not raise the sum.
    """
    return int(
        min(
            np.searchsorted(cdf, target, side="right"),
            np.searchsorted(cdf, cdf[-1], side="left"),
        )
    )
