"""`specification/top.py`'s comparable rows in torch."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max


def comparable_rows(logits: Tensor) -> Tensor:
    """A float32 copy in which NaN is -inf and +inf the largest number, as `top.comparable` does."""
    return logits.float().nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
