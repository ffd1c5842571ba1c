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
from lora_serve.sampling.specification.adjust import adjusted
from lora_serve.sampling.specification.draw import draw_token
from lora_serve.sampling.specification.logprobs import float_rows, row_logprobs, token_logprobs
from lora_serve.sampling.specification.philox import random_bits
from lora_serve.sampling.specification.top import comparable
from lora_serve.sampling.specification.weights import FloatRow
from lora_serve.step import SampleInput, TokenLogprobs


class SpecificationSampler:
    """The `Sampler` that all others are compared with."""

    def sample(
        self,
        logits: Tensor,
        inputs: Sequence[SampleInput],
        pending_tokens: Tensor | None = None,
    ) -> HostSamplerOutput:
        return HostSamplerOutput(sample(logits, count_pending(inputs, pending_tokens)))

    def token_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        return token_logprobs(logits, token_ids, num_top)


def load(launcher: object) -> SpecificationSampler:
    assert launcher is None, f"numpy needs no launcher, not {launcher}"
    return SpecificationSampler()


def sample(logits: Tensor, inputs: Sequence[SampleInput]) -> list[SampledToken]:
    """One token for each row, with logprobs of the unchanged logits where params.logprobs is set.

    Never fails on what a model computes: see `top.comparable` for NaN and infinities.

    Args:
        logits: (N, V), any float type, on any device; not changed.
        inputs: N, one for each row.
    """
    rows = float_rows(logits)
    with np.errstate(over="ignore"):  # beyond float32 is an infinity, which is a fair logit
        return [_sample_row(row, item) for row, item in zip(rows, inputs, strict=True)]


def _sample_row(row: FloatRow, item: SampleInput) -> SampledToken:
    token_id = _choose(row, item)
    if item.params.logprobs is None:
        return token_id, None
    return token_id, row_logprobs(row, token_id, item.params.logprobs)


def _choose(row: FloatRow, item: SampleInput) -> int:
    row = comparable(adjusted(row, item))
    greedy = int(row.argmax())
    if item.params.is_greedy or row[greedy] == -np.inf:
        return greedy
    return draw_token(row, item.params, random_bits(item.seed, item.position))
