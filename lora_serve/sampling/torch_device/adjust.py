"""What requests change in their logits: `specification/adjust.py` in torch, for many rows at once.

Each entry is changed by itself and in the order of that file, so the bits are the same. Numbers go
to the device as tensors: by a host's number it would divide otherwise, and round otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.host_copies import to_device
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput

_NOT_SEEN = -1


def adjust(
    rows: Tensor, inputs: Sequence[SampleInput], pending_tokens: Tensor | None = None
) -> None:
    """Change the rows (M, V), float32 and contiguous, in place.

    pending_tokens: (M), as `Sampler.sample` has them.
    """
    if any(item.bitmask is not None for item in inputs):
        _keep_allowed(rows, [item.bitmask for item in inputs])
    if any(item.banned_token_ids for item in inputs):
        _ban(rows, [item.banned_token_ids for item in inputs])
    if any(item.params.logit_bias for item in inputs):
        _add_biases(rows, [item.params for item in inputs])
    if any(item.params.has_penalties for item in inputs):
        _penalize(rows, inputs, pending_tokens)


def _keep_allowed(rows: Tensor, bitmasks: Sequence[bytes | None]) -> None:
    vocab_size = rows.shape[1]
    table = np.zeros((len(bitmasks), -(-vocab_size // 8)), np.uint8)
    for words, bitmask in zip(table, bitmasks, strict=True):
        if bitmask is None:
            words[:] = 0xFF
            continue
        given = np.frombuffer(bitmask, np.uint8)[: len(words)]
        words[: len(given)] = given
    bits = torch.arange(8, dtype=torch.uint8, device=rows.device)
    allowed = (_on_device(table, rows)[:, :, None] >> bits & 1).view(len(bitmasks), -1)
    rows.masked_fill_(allowed[:, :vocab_size] == 0, -torch.inf)


def _ban(rows: Tensor, ids: Sequence[Sequence[int]]) -> None:
    rows.view(-1).index_fill_(0, _entries(rows, ids).places, -torch.inf)


def _add_biases(rows: Tensor, params: Sequence[SamplingParams]) -> None:
    entries, logits = _entries(rows, [each.biased_token_ids for each in params]), rows.view(-1)
    values = np.concatenate([np.asarray(each.biases) for each in params])
    logits[entries.places] += _on_device(entries.of_known(values), rows)


def _penalize(rows: Tensor, inputs: Sequence[SampleInput], pending_tokens: Tensor | None) -> None:
    seen = _entries(rows, [item.seen.token_ids for item in inputs])
    num_drawn = seen.of_known(np.concatenate([item.seen.num_drawn for item in inputs]))
    places = seen.places
    all_counts = torch.full((rows.numel(),), _NOT_SEEN, dtype=torch.int32, device=rows.device)
    all_counts[places] = _on_device(num_drawn, rows)
    if pending_tokens is not None:
        others = _count(all_counts, pending_tokens, rows.shape[1])
        places = torch.cat((places, others))  # some twice: they get one value
    owners = places // rows.shape[1]

    def of_rows(values: list[float]) -> Tensor:
        return _on_device(np.array(values, np.float32), rows)[owners]

    params, logits, counts = [item.params for item in inputs], rows.view(-1), all_counts[places]
    repetition = of_rows([each.repetition_penalty for each in params])
    frequency = of_rows([each.frequency_penalty for each in params])
    presence = of_rows([each.presence_penalty for each in params])
    found = logits[places]
    repeated = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where(counts > _NOT_SEEN, repeated, found)
    logits[places] = torch.where(counts > 0, found - frequency * counts - presence, found)


def _count(all_counts: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Count one more token of each row, but for those of -1; where they stand, or anything does."""
    starts = vocab_size * torch.arange(len(token_ids), device=token_ids.device)
    places = starts + token_ids.clamp(min=0)
    counts = all_counts[places]
    all_counts[places] = torch.where(token_ids < 0, counts, counts.clamp(min=0) + 1)
    return places


@dataclass(frozen=True, slots=True)
class _Entries:
    """Some entries of rows, K of them.

    is_known: of all ids that were given, which are in the vocabulary: a tokenizer may name more.
    places (K), on the device: in the rows laid out one after the other.
    """

    is_known: npt.NDArray[np.bool_]
    places: Tensor

    def of_known(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Pick from `values`, which has one for each id given, those of known ids."""
        return values if self.is_known.all() else values[self.is_known]


def _entries(rows: Tensor, ids: Sequence[Sequence[int]]) -> _Entries:
    """ids: of each row."""
    vocab_size, sizes = rows.shape[1], np.array([len(each) for each in ids])
    given = np.concatenate([np.asarray(each, np.int64) for each in ids])
    is_known = (given >= 0) & (given < vocab_size)
    if not is_known.all():
        owners = np.arange(len(ids)).repeat(sizes)
        given, sizes = given[is_known], np.bincount(owners[is_known], minlength=len(ids))
    starts = vocab_size * torch.arange(len(ids), device=rows.device)
    starts = starts.repeat_interleave(_on_device(sizes, rows), output_size=len(given))
    return _Entries(is_known, starts + _on_device(given, rows))


def _on_device(values: npt.NDArray[np.generic], rows: Tensor) -> Tensor:
    return to_device(torch.from_numpy(values), rows.device)
