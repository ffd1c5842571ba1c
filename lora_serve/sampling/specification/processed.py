"""The logits that a token is drawn from, one row at a time: what processed logprobs are made of."""

from __future__ import annotations

import numpy as np

from lora_serve.sampling.specification.adjust import adjusted
from lora_serve.sampling.specification.draw import drawable
from lora_serve.sampling.specification.top import comparable
from lora_serve.sampling.specification.weights import FloatRow
from lora_serve.step import SampleInput


def processed(row: FloatRow, item: SampleInput) -> FloatRow:
    """The row as `item` changes it, divided by the temperature; -inf for what is filtered out.

    A greedy request has neither temperature nor filters, as in vLLM.
    """
    row = comparable(adjusted(row, item))
    if item.params.is_greedy or row.max() == -np.inf:
        return row
    scaled = row * np.float32(1 / item.params.temperature)
    kept = drawable(row, item.params)
    if kept is not None:
        scaled[~kept] = -np.inf
    return scaled
