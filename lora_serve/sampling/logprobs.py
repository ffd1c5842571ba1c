"""Log-probabilities from logits as the model gave them: before bias, penalties and temperature.

Row by row, so that a row's figures do not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lora_serve.sampling.top import FloatRow, comparable, top_ids
from lora_serve.step import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """What stands at each row, and the likeliest alternatives.

    Args:
        logits: (N, V), float32, on the CPU.
        token_ids: N ids in [0, V), the token that stands at each row.
        num_top: how many of the likeliest to list.
    """
    with np.errstate(over="ignore"):
        return [
            row_logprobs(row, token_id, num_top)
            for row, token_id in zip(logits.numpy(), token_ids, strict=True)
        ]


def row_logprobs(row: FloatRow, token_id: int, num_top: int) -> TokenLogprobs:
    """The same for one row, (V). Tokens of equal logit share a rank; NaN counts as -inf."""
    row = comparable(row)
    log_total = _log_sum_exp(row)
    return TokenLogprobs(
        token_id=token_id,
        logprob=_logprob(row, token_id, log_total),
        rank=1 + int(np.count_nonzero(row > row[token_id])),
        top=tuple((int(i), _logprob(row, i, log_total)) for i in top_ids(row, num_top)),
    )


def _log_sum_exp(row: FloatRow) -> float:
    peak = row.max()
    if peak == -np.inf:
        return -math.inf
    return float(peak) + math.log(np.exp(row - peak).sum(dtype=np.float64))


def _logprob(row: FloatRow, token_id: int | np.int64, log_total: float) -> float:
    logit = float(row[token_id])
    return logit - log_total if logit > -math.inf else -math.inf
