"""Log-probabilities from logits as the model gave them: before bias, penalties and temperature.

Row by row, so that a row's figures do not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lora_serve.sampling.specification.top import comparable, top_ids
from lora_serve.sampling.specification.weights import UNIT, FloatRow, relative_weights, units
from lora_serve.step import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: int, *, as_logits: bool = False
) -> list[TokenLogprobs]:
    """What stands at each row, and the most likely alternatives.

    Args:
        logits: (N, V), any float type, on any device.
        token_ids: N ids in [0, V), the token that stands at each row.
        num_top: how many of the most likely to list.
        as_logits: tell their logits instead.
    """
    with np.errstate(over="ignore"):
        return [
            row_logprobs(row, token_id, num_top, as_logits=as_logits)
            for row, token_id in zip(float_rows(logits), token_ids, strict=True)
        ]


def row_logprobs(
    row: FloatRow,
    token_id: int,
    num_top: int,
    *,
    as_logits: bool = False,
    listed: Sequence[int] = (),
) -> TokenLogprobs:
    """The logprobs of one row, (V); with the listed tokens in place of the most likely, if any.

    Tokens of equal logit share a rank; NaN counts as -inf.
    """
    row = comparable(row)
    ids = listed or top_ids(row, num_top)
    peak = row.max()
    total = 0 if peak == -np.inf else int(units(relative_weights(row, np.float32(1))).sum())
    log_total = 0.0 if as_logits else log_sum_exp(float(peak), total)
    return TokenLogprobs(
        token_id=token_id,
        logprob=logprob(float(row[token_id]), log_total),
        rank=1 + int(np.count_nonzero(row > row[token_id])),
        top=tuple((int(i), logprob(float(row[i]), log_total)) for i in ids),
    )


def float_rows(logits: Tensor) -> FloatRow:
    """(N, V) in float32, which holds any logit exactly."""
    rows: FloatRow = logits.to("cpu", torch.float32).numpy()
    return rows


def log_sum_exp(peak: float, total: int) -> float:
    """The log of the sum of a row with the largest logit `peak` and weights of `total` units."""
    return -math.inf if peak == -math.inf else peak + math.log(total / UNIT)


def logprob(logit: float, log_total: float) -> float:
    return logit - log_total if logit > -math.inf else -math.inf
