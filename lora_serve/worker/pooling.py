"""What is pooled of hidden states, on the device. Knows no request."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_serve.host_copies import HostCopy, to_host
from lora_serve.pooling import LARGEST_VALUE, UNITS

ROWS_AT_ONCE = 256  # a few MB for each 1000 values of a hidden state


def pooled_rows(hidden: Tensor) -> HostCopy:
    """The rows as they are; a copy, since recorded steps use the memory of theirs again."""
    return to_host(hidden.to(torch.float32, copy=True))


def summed_rows(hidden: Tensor) -> HostCopy:
    """The sums of (N, H) hidden states over their rows, as `RequestStepOutput.hidden_sums`."""
    num_values = hidden.shape[1]
    sums = torch.zeros(num_values + 1, dtype=torch.int64, device=hidden.device)
    for rows in hidden.split(ROWS_AT_ONCE):
        values = rows.to(torch.float32)
        is_summed = values.abs() <= LARGEST_VALUE  # False for NaN
        units = torch.where(is_summed, values, 0.0).mul_(UNITS).round_()
        sums[:num_values] += units.to(torch.int64).sum(0)
        sums[num_values] += is_summed.logical_not_().sum()
    return to_host(sums)
