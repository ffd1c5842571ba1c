"""What requests change in their logits: `adjust.py` in torch, for many rows at once.

Each entry is changed by itself and in the order of that file, so the bits are the same. Numbers go
to the device as tensors: by a host's number it would divide otherwise, and round otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.host_copies import to_device
from lora_serve.step import SampleInput


def adjust(rows: Tensor, inputs: Sequence[SampleInput]) -> None:
    """Change the rows (M, V), float32 and contiguous, in place."""
    if any(item.banned_token_ids for item in inputs):
        _ban(rows, [item.banned_token_ids for item in inputs])
    if any(item.params.logit_bias for item in inputs):
        _add_biases(rows, [item.params.logit_bias for item in inputs])
    if any(item.params.has_penalties for item in inputs):
        _penalize(rows, inputs)


def _ban(rows: Tensor, ids: Sequence[Sequence[int]]) -> None:
    entries = _entries(rows, ids)
    rows.view(-1).index_fill_(0, _on_device(entries.places, rows), -torch.inf)


def _add_biases(rows: Tensor, biases: Sequence[Mapping[int, float]]) -> None:
    entries, logits = _entries(rows, [tuple(each) for each in biases]), rows.view(-1)
    values = np.array([bias for each in biases for bias in each.values()], np.float32)
    places = _on_device(entries.places, rows)
    logits[places] += _on_device(values[entries.is_known], rows)


def _penalize(rows: Tensor, inputs: Sequence[SampleInput]) -> None:
    params, logits = [item.params for item in inputs], rows.view(-1)
    seen = _entries(rows, [item.seen.token_ids for item in inputs])
    places = _on_device(seen.places, rows)
    penalties = _on_device(seen.of_rows([each.repetition_penalty for each in params]), rows)
    found = logits[places]
    logits[places] = torch.where(found > 0, found / penalties, found * penalties)

    counts = np.concatenate([item.seen.num_drawn for item in inputs])[seen.is_known]
    is_drawn, counts = counts > 0, counts.astype(np.float32)
    frequency = seen.of_rows([each.frequency_penalty for each in params]) * counts
    presence = seen.of_rows([each.presence_penalty for each in params])
    places = _on_device(seen.places[is_drawn], rows)
    logits[places] -= _on_device(frequency[is_drawn], rows)
    logits[places] -= _on_device(presence[is_drawn], rows)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Some entries of rows, K of them.

    is_known: of all ids that were given, which are in the vocabulary: a tokenizer may name more.
    owners (K): their rows. places (K): in the rows laid out one after the other.
    """

    is_known: npt.NDArray[np.bool_]
    owners: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    def of_rows(self, values: Sequence[float]) -> npt.NDArray[np.float32]:
        """(K): each row's number at each of its entries."""
        return np.array(values, np.float32)[self.owners]


def _entries(rows: Tensor, ids: Sequence[Sequence[int]]) -> _Entries:
    """ids: of each row."""
    vocab_size = rows.shape[1]
    given = np.concatenate([np.asarray(each, np.int64) for each in ids])
    owners = np.arange(len(ids)).repeat([len(each) for each in ids])
    is_known = (given >= 0) & (given < vocab_size)
    return _Entries(is_known, owners[is_known], (owners * vocab_size + given)[is_known])


def _on_device(values: npt.NDArray[np.generic], rows: Tensor) -> Tensor:
    return to_device(torch.from_numpy(values), rows.device)
