"""What a request changes in its logits before a token is chosen. One row at a time.

The order is vLLM's: banned tokens, logit_bias, repetition, frequency, presence penalty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lora_serve.sampling.weights import FloatRow
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput


def adjusted(row: FloatRow, item: SampleInput) -> FloatRow:
    """The row as `item` wants it: a copy if anything changes, else the row itself.

    Ids outside the vocabulary change nothing: a tokenizer may name more tokens than a model has.
    """
    params = item.params
    if not (item.banned_token_ids or params.logit_bias or params.has_penalties):
        return row
    row = row.copy()
    row[_known(item.banned_token_ids, len(row))] = -np.inf
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(row):
            row[token_id] += np.float32(bias)
    if params.has_penalties:
        _penalize(row, item)
    return row


def _penalize(row: FloatRow, item: SampleInput) -> None:
    params = item.params
    prompt_ids = _known(item.prompt_token_ids, len(row))
    output_ids = _known(item.output_token_ids, len(row))
    if params.repetition_penalty != 1.0:
        seen = np.zeros(len(row), np.bool_)
        seen[prompt_ids] = True
        seen[output_ids] = True
        _penalize_repetition(row, np.flatnonzero(seen), params.repetition_penalty)
    _penalize_counts(row, np.bincount(output_ids, minlength=len(row)), params)


def _penalize_repetition(row: FloatRow, ids: NDArray[np.int64], penalty: float) -> None:
    """Make what was seen less likely by a factor on its logit (Keskar et al. 2019, CTRL)."""
    logits = row[ids]
    row[ids] = np.where(logits > 0, logits / np.float32(penalty), logits * np.float32(penalty))


def _penalize_counts(row: FloatRow, counts: NDArray[np.int64], params: SamplingParams) -> None:
    """OpenAI's formula: subtract counts * frequency_penalty, and presence_penalty once."""
    ids = np.flatnonzero(counts)
    row[ids] -= np.float32(params.frequency_penalty) * counts[ids].astype(np.float32)
    row[ids] -= np.float32(params.presence_penalty)


def _known(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    ids = np.asarray(token_ids, np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]
