"""What a worker asks of a sampler: tokens from logits, and the logprobs of tokens that are given.

`specification/` says in numpy, one row at a time, what the answers are. Every other sampler gives
the same to the bit, and what a row gets never depends on the other rows of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lora_serve.step import SampleInput, TokenLogprobs

SampledToken = tuple[int, TokenLogprobs | None]


class SamplerOutput(Protocol):
    """The tokens of N rows of logits, known to the host or still on their way to it."""

    @property
    def token_ids(self) -> Tensor:
        """(N), int64, where the logits are, in the order of the work there."""

    def wait(self) -> Sequence[SampledToken]:
        """Each row's token, and its logprobs where they were asked for, once they are there."""


class Sampler(Protocol):
    """One backend's way from logits to tokens. Logits are (N, V), any float type, never changed."""

    def sample(
        self,
        logits: Tensor,
        inputs: Sequence[SampleInput],
        pending_tokens: Tensor | None = None,
    ) -> SamplerOutput:
        """One token for each row, with logprobs of the logits as they are where params ask.

        Never fails on what a model computes: see `specification.top.comparable` for NaN and
        infinities.

        Args:
            logits: on the device that the sampler is for.
            inputs: N, one for each row.
            pending_tokens: (N), int64, on the same device: a token of each row that was drawn and
                that its SampleInput.seen does not count, or -1; None if no row has one.
        """

    def token_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """The logprobs of N given tokens, in [0, V), each with the num_top most likely."""
