"""The next token of each row of logits, as its request asked for it.

One row at a time: what a request gets never depends on the others in its batch. This is the
specification, in numpy; the other samplers give the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lora_serve.sampling.contract import SampledToken
from lora_serve.sampling.host import HostSamplerOutput, count_pending
from lora_serve.sampling.logprobs_mode import RAW_LOGPROBS, LogprobsMode
from lora_serve.sampling.specification.adjust import adjusted
from lora_serve.sampling.specification.draw import draw_token
from lora_serve.sampling.specification.logprobs import float_rows, row_logprobs, token_logprobs
from lora_serve.sampling.specification.philox import random_bits
from lora_serve.sampling.specification.processed import processed
from lora_serve.sampling.specification.top import comparable
from lora_serve.sampling.specification.weights import FloatRow
from lora_serve.step import SampleInput, TokenLogprobs


class SpecificationSampler:
    """The `Sampler` that all others are compared with."""

    def __init__(self, mode: LogprobsMode = RAW_LOGPROBS) -> None:
        self._mode = mode

    def sample(
        self,
        logits: Tensor,
        inputs: Sequence[SampleInput],
        pending_tokens: Tensor | None = None,
    ) -> HostSamplerOutput:
        return HostSamplerOutput(sample(logits, count_pending(inputs, pending_tokens), self._mode))

    def token_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        return token_logprobs(logits, token_ids, num_top, as_logits=self._mode.is_logits)


def load(launcher: object, mode: LogprobsMode = RAW_LOGPROBS) -> SpecificationSampler:
    assert launcher is None, f"numpy needs no launcher, not {launcher}"
    return SpecificationSampler(mode)


def sample(
    logits: Tensor, inputs: Sequence[SampleInput], mode: LogprobsMode = RAW_LOGPROBS
) -> list[SampledToken]:
    """One token for each row, with logprobs, as the mode says, where params.logprobs is set.

    Never fails on what a model computes: see `top.comparable` for NaN and infinities.

    Args:
        logits: (N, V), any float type, on any device; not changed.
        inputs: N, one for each row.
    """
    rows = float_rows(logits)
    with np.errstate(over="ignore"):  # beyond float32 is an infinity, which is a fair logit
        return [_sample_row(row, item, mode) for row, item in zip(rows, inputs, strict=True)]


def _sample_row(row: FloatRow, item: SampleInput, mode: LogprobsMode) -> SampledToken:
    token_id = _choose(row, item)
    if item.params.logprobs is None:
        return token_id, None
    told = processed(row, item) if mode.is_processed else row
    return token_id, row_logprobs(
        told,
        token_id,
        item.params.logprobs,
        as_logits=mode.is_logits,
        listed=item.params.logprob_token_ids,
    )


def _choose(row: FloatRow, item: SampleInput) -> int:
    row = comparable(adjusted(row, item))
    greedy = int(row.argmax())
    if item.params.is_greedy or row[greedy] == -np.inf:
        return greedy
    return draw_token(row, item.params, random_bits(item.seed, item.position))
