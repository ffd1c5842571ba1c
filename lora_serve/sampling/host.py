"""What samplers that run on the host share: their tokens are known when `sample` returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from lora_serve.ops.contract import TokenChoice
from lora_serve.sampling.contract import SampledToken
from lora_serve.step import SampleInput

_UINT64 = 2**64 - 1


class HostSamplerOutput:
    """A `SamplerOutput` that is there already."""

    def __init__(self, tokens: Sequence[SampledToken]) -> None:
        self._tokens = tokens

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([token_id for token_id, _ in self._tokens], dtype=torch.int64)

    def wait(self) -> Sequence[SampledToken]:
        return self._tokens


def count_pending(
    inputs: Sequence[SampleInput], pending_tokens: Tensor | None
) -> Sequence[SampleInput]:
    """The inputs with their pending tokens counted, which a host knows by now."""
    if pending_tokens is None:
        return inputs
    return [
        item if token_id < 0 else replace(item, seen=item.seen.and_drawn(token_id))
        for item, token_id in zip(inputs, pending_tokens.tolist(), strict=True)
    ]


def token_choice(item: SampleInput) -> TokenChoice:
    params = item.params
    return TokenChoice(
        scale=0.0 if params.is_greedy else 1 / params.temperature,
        min_p=params.min_p,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=item.seed & _UINT64,
        position=item.position,
    )
