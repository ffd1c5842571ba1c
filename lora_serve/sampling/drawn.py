"""Tokens that were asked for, row by row, whether or not the host knows them yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lora_serve.step import TokenLogprobs


class Drawn(Protocol):
    """What N rows of logits gave."""

    @property
    def token_ids(self) -> Tensor:
        """(N), int64, where the logits are, in the order of the work there."""

    def tell(self) -> Sequence[tuple[int, TokenLogprobs | None]]:
        """As `sampler.sample` returns it; waits until it is there."""


class KnownDraws:
    """Of a sampler on the host. results: as `sampler.sample` returns them."""

    def __init__(self, results: Sequence[tuple[int, TokenLogprobs | None]]) -> None:
        self._results = results

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([token_id for token_id, _ in self._results], dtype=torch.int64)

    def tell(self) -> Sequence[tuple[int, TokenLogprobs | None]]:
        return self._results
