"""The sampler of ranks beside the first: they give their share of the logits, and draw nothing.

Tokens are drawn by the first rank alone, so that there is one truth about them; the others get
those that the next step begins with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.sampling.contract import SampledToken, SamplerOutput
from lora_serve.step import SampleInput, TokenLogprobs


class NothingDrawn:
    """A `SamplerOutput` whose tokens another rank has. token_ids: of the right number alone."""

    def __init__(self, logits: Tensor) -> None:
        self.token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)

    def wait(self) -> Sequence[SampledToken]:
        return [(0, None)] * len(self.token_ids)


class FollowingSampler:
    """A `Sampler` that draws nothing."""

    def sample(
        self,
        logits: Tensor,
        inputs: Sequence[SampleInput],
        pending_tokens: Tensor | None = None,
    ) -> SamplerOutput:
        return NothingDrawn(logits)

    def token_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        return []
