"""The next token of each row of logits, as its request asked for it.

One row at a time: what a request gets never depends on the others in its batch. This is the
specification, in numpy; a backend that samples by itself (`Ops.sample`) gives the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lora_serve.sampling.adjust import adjusted
from lora_serve.sampling.draw import draw_token
from lora_serve.sampling.logprobs import float_rows, row_logprobs
from lora_serve.sampling.philox import random_bits
from lora_serve.sampling.top import comparable
from lora_serve.sampling.weights import FloatRow
from lora_serve.step import SampleInput, TokenLogprobs


def sample(logits: Tensor, inputs: Sequence[SampleInput]) -> list[tuple[int, TokenLogprobs | None]]:
    """One token for each row, with logprobs of the unchanged logits where params.logprobs is set.

    Never fails on what a model computes: see `top.comparable` for NaN and infinities.

    Args:
        logits: (N, V), any float type, on any device; not changed.
        inputs: N, one for each row.
    """
    rows = float_rows(logits)
    with np.errstate(over="ignore"):  # beyond float32 is an infinity, which is a fair logit
        return [_sample_row(row, item) for row, item in zip(rows, inputs, strict=True)]


def _sample_row(row: FloatRow, item: SampleInput) -> tuple[int, TokenLogprobs | None]:
    token_id = _choose(row, item)
    if item.params.logprobs is None:
        return token_id, None
    return token_id, row_logprobs(row, token_id, item.params.logprobs)


def _choose(row: FloatRow, item: SampleInput) -> int:
    row = comparable(adjusted(row, item))
    likeliest = int(row.argmax())
    if item.params.is_greedy or row[likeliest] == -np.inf:
        return likeliest
    return draw_token(row, item.params, random_bits(item.seed, item.position))
