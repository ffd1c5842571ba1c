"""What a request changes in its logits before a token is chosen. One row at a time.

The order is vLLM's: what a grammar bans and what else is banned, logit_bias, repetition, frequency,
presence penalty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lora_serve.bitmask import flags_of
from lora_serve.sampling.specification.weights import FloatRow
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput


def adjusted(row: FloatRow, item: SampleInput) -> FloatRow:
    """The row as `item` wants it: a copy if anything changes, else the row itself.

    Ids outside the vocabulary change nothing: a tokenizer may name more tokens than a model has.
    """
    params = item.params
    if not item.changes_logits:
        return row
    row = row.copy()
    if item.bitmask is not None:
        row[~allowed_tokens(item.bitmask, len(row))] = -np.inf
    row[_known(item.banned_token_ids, len(row))] = -np.inf
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(row):
            row[token_id] += np.float32(bias)
    if params.has_penalties:
        _penalize(row, item)
    return row


def allowed_tokens(bitmask: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """(V): which tokens a SampleInput.bitmask allows."""
    bits = flags_of(bitmask)[:vocab_size]
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[: len(bits)] = bits
    return allowed


def _penalize(row: FloatRow, item: SampleInput) -> None:
    ids, counts = np.asarray(item.seen.token_ids, np.int64), np.asarray(item.seen.num_drawn)
    is_known = _is_known(ids, len(row))
    ids, counts = ids[is_known], counts[is_known]
    _penalize_repetition(row, ids, item.params.repetition_penalty)
    _penalize_counts(row, ids[counts > 0], counts[counts > 0], item.params)


def _penalize_repetition(row: FloatRow, ids: NDArray[np.int64], penalty: float) -> None:
    """Make what was seen less likely by a factor on its logit (Keskar et al. 2019, CTRL)."""
    logits = row[ids]
    row[ids] = np.where(logits > 0, logits / np.float32(penalty), logits * np.float32(penalty))


def _penalize_counts(
    row: FloatRow, ids: NDArray[np.int64], counts: NDArray[np.int32], params: SamplingParams
) -> None:
    """OpenAI's formula: subtract counts * frequency_penalty, and presence_penalty once."""
    row[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    row[ids] -= np.float32(params.presence_penalty)


def _known(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    ids = np.asarray(token_ids, np.int64)
    return ids[_is_known(ids, vocab_size)]


def _is_known(ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.bool_]:
    return (ids >= 0) & (ids < vocab_size)
