"""One token from one row of logits and one random number: filters, then the inverse CDF.

The order is vLLM's: temperature, min_p, top_k, top_p. Weights are whole numbers (`weights.py`), the
random one as well, and so is all arithmetic between them: nothing here is ever rounded, and row and
number give the same token in any batch and on any backend.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lora_serve.sampling.specification.philox import RANDOM_BITS
from lora_serve.sampling.specification.top import ids_of_top
from lora_serve.sampling.specification.weights import FloatRow, Units, relative_weights, units
from lora_serve.sampling_params import SamplingParams


def draw_token(row: FloatRow, params: SamplingParams, random: int) -> int:
    """The token at `random` of the distribution's CDF, which runs through the ids in order.

    min_p and top_k commute, because min_p compares with the greedy token, which top_k keeps.
    top_k keeps exactly k tokens, so top_k=1 is greedy.

    Args:
        row: (V), comparable, with at least one entry above -inf; not changed.
        params: not greedy. random: in [0, 2**RANDOM_BITS).
    """
    ids, kept = _kept(row, params)
    index = _index_at(kept, random)
    return index if ids is None else int(ids[index])


def drawable(row: FloatRow, params: SamplingParams) -> NDArray[np.bool_] | None:
    """(V): what the filters leave of a row as of `draw_token`; None if there is no filter."""
    if not params.has_filters(len(row)):
        return None
    ids, kept = _kept(row, params)
    found = np.zeros(len(row), np.bool_)
    found[slice(None) if ids is None else ids] = kept > 0
    return found


def _kept(row: FloatRow, params: SamplingParams) -> tuple[NDArray[np.int64] | None, Units]:
    """The ids that top_k leaves, ascending, or None for all; and their units, 0 if filtered."""
    ids = None
    if 0 < params.top_k < len(row):
        ids = ids_of_top(row, params.top_k)
        row = row[ids]
    weights = relative_weights(row, np.float32(1 / params.temperature))
    kept = units(weights)
    if params.min_p > 0:
        kept[weights < np.float32(params.min_p)] = 0
    if params.top_p < 1:
        kept = _nucleus(weights, kept, params.top_p)
    return ids, kept


def _nucleus(weights: FloatRow, kept: Units, top_p: float) -> Units:
    """The units, with 0 for all but the fewest largest that together hold top_p of the sum.

    Among equal weights the lowest ids go first.
    """
    limit = max(1, int(top_p * float(kept.sum())))
    ids = np.flatnonzero(kept)
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    num_kept = 1 + int(np.searchsorted(kept[ids].cumsum(), limit, side="left"))
    nucleus = np.zeros_like(kept)
    nucleus[ids[:num_kept]] = kept[ids[:num_kept]]
    return nucleus


def _index_at(kept: Units, random: int) -> int:
    """Where the CDF of the units passes `random`; never an index of no weight."""
    cdf = kept.cumsum()
    target = int(cdf[-1]) * random >> RANDOM_BITS
    return int(np.searchsorted(cdf, target, side="right"))
