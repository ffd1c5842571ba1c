"""The largest logit among ranks, of which each has its share of the vocabulary.

The one rule: every rank finds the same, so that all go on alike. It is what one rank would find of
the whole vocabulary: the first of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.bitmask import bitmask_of_flags, flags_of
from lora_serve.distributed.group import Group
from lora_serve.distributed.shares import place_of
from lora_serve.ops.contract import Screen

OPEN = -1
_COLUMNS = 2  # of what a rank has found: its logit, and the token


class DividedArgmax:
    """A `ScreenedArgmax` of the whole vocabulary. own: of this rank's share."""

    def __init__(self, own: Screen, group: Group, vocab_size: int) -> None:
        self._own = own
        self._group = group
        self._share = place_of(group).share(vocab_size)

    def __call__(self, x: Tensor, bitmasks: Sequence[bytes | None]) -> list[int]:
        widths = [_COLUMNS] * self._group.world_size
        found = torch.empty(len(x), sum(widths), dtype=torch.float64)
        self._group.gather(self._find(x, bitmasks), widths, found)
        logits, tokens = found.view(len(x), -1, _COLUMNS).unbind(dim=2)
        largest = tokens.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0]
        largest[~logits.amax(dim=1).isfinite()] = OPEN
        return [int(token) for token in largest]

    def _find(self, x: Tensor, bitmasks: Sequence[bytes | None]) -> Tensor:
        """(N, 2), float64: NaN where a row is open, -inf where it allows none of the share."""
        masks = [None if mask is None else self._own_bits(mask) for mask in bitmasks]
        tokens = self._own(x, masks)
        logits = self._own.outputs(x, [max(0, token) for token in tokens])
        for row, token in enumerate(tokens):
            if token == OPEN:
                is_empty = bool(masks) and masks[row] is not None and not any(masks[row] or b"")
                logits[row] = -math.inf if is_empty else math.nan
        places = [self._share.start + token for token in tokens]
        return torch.tensor([logits, places], dtype=torch.float64).T.contiguous()

    def _own_bits(self, bitmask: bytes) -> bytes:
        return bitmask_of_flags(flags_of(bitmask)[self._share.start : self._share.stop])
