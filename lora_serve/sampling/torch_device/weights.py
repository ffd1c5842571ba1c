"""`specification/weights.py` and `top.py` in torch: the same bits, for many rows at once.

Each operation is one rounding by IEEE 754, or none, so no device has a choice in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_serve.sampling.specification.weights import (
    LEAST_EXPONENT,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    POLYNOMIAL,
    UNIT,
)

_ID_BITS = 24  # of a sort key; weights.MAX_VOCAB_SIZE takes 22


def relative_weights(rows: Tensor, scales: Tensor) -> Tensor:
    """e**((row - max(row)) * scale): 1 for the most likely.

    Args:
        rows: (M, V), float32, comparable, each with an entry above -inf.
        scales: (M, 1), float32.
    """
    x = (rows - rows.amax(1, keepdim=True)) * scales
    x = x.clamp(min=float(LEAST_EXPONENT))
    n = (x * float(LOG2_E)).round()
    r = (x - n * float(LN2_HIGH)) - n * float(LN2_LOW)
    p = torch.full_like(r, float(POLYNOMIAL[0]))
    for c in POLYNOMIAL[1:]:
        p = p * r + float(c)  # two operations, rounded twice
    power_of_two = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return p * power_of_two


def units(weights: Tensor) -> Tensor:
    """Relative weights as whole numbers of `UNIT`, int64."""
    return (weights * float(UNIT)).to(torch.int64)


def largest(rows: Tensor, k: int) -> Tensor:
    """(M, k): ids of each row's k largest, largest first and lowest id first among equals.

    Keys that no two entries share make the selection exact, whatever algorithm selects.
    """
    bits = (rows + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    width = rows.shape[1]
    keys = (ordered << _ID_BITS) + torch.arange(width - 1, -1, -1, device=rows.device)
    return keys.topk(min(k, width), dim=1).indices
